package replicas

import (
	"context"
	"strconv"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
)

// keepNumber saves how many replicas there are whenever that has changed. So a replica that starts while the store is
// down knows by how many callers' limits are shared.
func (r *Replica) keepNumber(ctx context.Context, storage certmagic.Storage, key string) {
	text, _ := storage.Load(ctx, key) // without a number, it is as at the first start
	saved, _ := strconv.Atoi(string(text))
	r.tally.Expect(time.Now(), saved)
	failed := 0 // the number of which the log says that it is not saved
	for pause(ctx, lifetime) {
		n := r.tally.Replicas()
		if n <= 0 || n == saved {
			continue
		}
		if err := storage.Store(ctx, key, []byte(strconv.Itoa(n))); err == nil {
			saved, failed = n, 0
		} else if failed != n {
			failed = n
			r.logger.Load().Error("could not save the number of replicas", zap.String("key", key), zap.Error(err))
		}
	}
}
