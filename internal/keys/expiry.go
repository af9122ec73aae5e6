package keys

import (
	"errors"
	"maps"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

const (
	// expiresField is the prefix of the field that gives a key's expiry date.
	expiresField = "expires="
	// expiryNotice is how long before a key expires this is logged, once each
	// noticeInterval.
	expiryNotice   = 7 * 24 * time.Hour
	noticeInterval = 24 * time.Hour
	// maxNotices is the number of keys for which the time of the last notice is
	// kept.
	maxNotices = 10_000
)

// errLine describes the fields of a line in a file of keys.
var errLine = errors.New("expected a name, a key and at most " + tierField + "<name> and a date like " + expiresField + "2027-01-31")

// parseExpiry returns the end of the day that a field like expires=2027-01-31
// names.
func parseExpiry(field string, location *time.Location) (time.Time, error) {
	date, ok := strings.CutPrefix(field, expiresField)
	day, err := time.ParseInLocation(time.DateOnly, date, location)
	if !ok || err != nil {
		return time.Time{}, errLine
	}
	return day.AddDate(0, 0, 1), nil
}

// expiry is when a key expires.
type expiry struct {
	at time.Time // zero: never
	// noticed reports whether the expiry was noticed. The mutex of Clients
	// guards it.
	noticed bool
}

// notices has the time at which the expiry of each key was last logged. It
// survives reloads of the config.
var notices struct {
	mu   sync.Mutex
	last map[blinded]time.Time
}

// dueNotice reports whether to log now that a key expires soon, and records
// that.
func dueNotice(key blinded, now time.Time) bool {
	notices.mu.Lock()
	defer notices.mu.Unlock()
	if last, known := notices.last[key]; known && now.Sub(last) < noticeInterval && !now.Before(last) {
		return false
	}
	if notices.last == nil {
		notices.last = make(map[blinded]time.Time)
	}
	if len(notices.last) >= maxNotices { // most are of keys that are gone
		maps.DeleteFunc(notices.last, func(_ blinded, last time.Time) bool { return now.Sub(last) >= noticeInterval })
	}
	if len(notices.last) < maxNotices {
		notices.last[key] = now
	}
	return true
}

// never is the expiry of all keys without a date.
var never = new(expiry)

func (e *expiry) isOver() bool { return !e.at.IsZero() && !time.Now().Before(e.at) }

// noticeExpiry logs the keys that expire soon. It reports whether any key has
// newly expired.
func (c *Clients) noticeExpiry(now time.Time) (expired bool) {
	for _, client := range c.expiring {
		e := client.expiry
		left := e.at.Sub(now)
		if left <= 0 && !e.noticed {
			e.noticed, expired = true, true
		}
		if left <= 0 || left > expiryNotice || !dueNotice(client.digest, now) {
			continue
		}
		c.config.Logger.Warn("client key expires soon",
			zap.String("caller", client.Name), zap.String("expires", e.at.Format(time.RFC3339)))
	}
	return expired
}
