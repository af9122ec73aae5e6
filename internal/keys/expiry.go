package keys

import (
	"errors"
	"strings"
	"time"

	"go.uber.org/zap"
)

const (
	// expiresField begins a field of a line with a key that expires.
	expiresField = "expires="
	// expiryNotice is how long before a key expires that is logged, once each noticeInterval.
	expiryNotice   = 7 * 24 * time.Hour
	noticeInterval = 24 * time.Hour
)

// errLine says what a line of a file of keys may have.
var errLine = errors.New("expected a name, a key and at most " + tierField + "<name> and a date like " + expiresField + "2027-01-31")

// parseExpiry returns the end of the day that a field like expires=2027-01-31 names.
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
	// noticed is when it was last logged that this is soon, and over reports whether it was seen that it is over. The mutex
	// of Clients guards them.
	noticed time.Time
	over    bool
}

// never is the expiry of all keys without a date.
var never = new(expiry)

func (e *expiry) isOver() bool { return !e.at.IsZero() && !time.Now().Before(e.at) }

// noticeExpiry logs which keys expire soon. It reports whether another one has expired.
func (c *Clients) noticeExpiry(now time.Time) (expired bool) {
	for _, client := range c.expiring {
		e := client.expiry
		left := e.at.Sub(now)
		if left <= 0 && !e.over {
			e.over, expired = true, true
		}
		if left <= 0 || left > expiryNotice || !e.noticed.IsZero() && now.Sub(e.noticed) < noticeInterval {
			continue
		}
		e.noticed = now
		c.config.Logger.Warn("client key expires soon", zap.String("caller", client.Name), zap.String("expires", e.at.Format(time.RFC3339)))
	}
	return expired
}
