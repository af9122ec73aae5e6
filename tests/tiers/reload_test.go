package tiers

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestHowMuchOfABackendIsUsedStaysThroughAReload and so does who has asked for
// the model. The reading fades within a minute, and the share is high, so the
// reload may take nearly as long.
func TestHowMuchOfABackendIsUsedStaysThroughAReload(t *testing.T) {
	ptu, serverOfPTU := lbtest.Listen(t, "ptu")
	_, serverOfPayg := lbtest.Listen(t, "payg")
	port, pool := lbtest.FreePort(t), lbtest.Unique("tiers")
	config := func(number int) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://:%d {\nheader X-Config %d\nopenai_lb {\npool %s\n", port, number, pool) +
			fmt.Sprintf("backend %s {\nmodel gpt-4o\n}\nbackend %s {\nmodel gpt-4o\npriority 2\n}\n", serverOfPTU.URL, serverOfPayg.URL) +
			"client_key web " + keys["web"] + "\nclient_key batch " + keys["batch"] + "\ncaller web {\ntier interactive\n}\ncaller batch {\ntier batch\n}\n" +
			"tier interactive {\nreserve 99%\n}\ntier batch\n}\n}"
	}
	url := fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)
	wantAt := func(client *http.Client, caller, backend string) {
		t.Helper()
		lbtest.Post(client, url, chat, "Authorization", "Bearer "+keys[caller]).WantServed(t, backend)
	}
	ptu.Replies(lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`, "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "60"))
	lbtest.Run(t, config(1))
	client := lbtest.ClientOf(t, "1", url) // it has no key
	wantAt(client, "batch", "ptu")
	wantAt(client, "web", "ptu")
	wantAt(client, "batch", "payg")
	lbtest.Reload(t, config(2))
	client = lbtest.ClientOf(t, "2", url)
	wantAt(client, "batch", "payg")
	wantAt(client, "web", "ptu")
}
