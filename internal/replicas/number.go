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
	for pause(ctx, lifetime) {
		if n := r.tally.Replicas(); n > 0 && n != saved {
			if err := storage.Store(ctx, key, []byte(strconv.Itoa(n))); err != nil {
				r.logger.Load().Error("could not save the number of replicas", zap.String("key", key), zap.Error(err))
				continue
			}
			saved = n
		}
	}
}
