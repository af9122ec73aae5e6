package ledger

import (
	"testing"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func TestARequestIsRecordedWithoutAllocating(t *testing.T) {
	var recorder seam.UsageRecorder = Open("main", &certmagic.FileStorage{Path: t.TempDir()}, zap.NewNop())
	defer recorder.Close()
	u := seam.Usage{Time: time.Now(), Caller: "alice", Model: "gpt-5.5", Backend: "east", Cost: ratelimit.Cost{Requests: 1, Prompt: 7, Output: 5}}
	if got := testing.AllocsPerRun(1000, func() { recorder.Record(u) }); got >= 1 {
		t.Errorf("each request allocates %v times", got)
	}
	use := recorder.OfCaller(u.Time, "alice").([]ModelUse)
	if len(use) != 1 || use[0].Today.Requests != 1001 || use[0].Today.EstimatedInput != 7*1001 {
		t.Errorf("got %+v", use)
	}
}
