package limiter

import (
	"sort"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
)

// window is the period of time in which a limit counts. Times are nanoseconds
// since 1970.
type window struct {
	// index numbers the windows of a unit in the same way at all replicas.
	index int64
	// start is the first nanosecond of the window, and end the first one after
	// it.
	start, end int64
}

func (w window) holds(at int64) bool { return w.start <= at && at < w.end }

// windowAt returns the unit's window at a time. Days and months begin at
// midnight in the location.
func windowAt(u ratelimit.Unit, at int64, location *time.Location) window {
	if length := int64(u.Length()); !u.Calendar() {
		i := at / length
		if at%length < 0 {
			i--
		}
		return window{i, i * length, (i + 1) * length}
	}
	// The longest day has 25 hours (the longest ever in a zone had 48), the
	// longest month 31 days and an hour.
	longest := int64(50 * 60 * 60)
	if u == ratelimit.Month {
		longest = 33 * 24 * 60 * 60
	}
	second := time.Unix(0, at).Unix()
	i := dateOf(u, second, location)
	return window{i,
		beginning(u, i, second-longest, second, location) * int64(time.Second),
		beginning(u, i+1, second, second+longest, location) * int64(time.Second)}
}

// dateOf returns the number of the day or month that contains a second since
// 1970.
func dateOf(u ratelimit.Unit, second int64, location *time.Location) int64 {
	year, month, day := time.Unix(second, 0).In(location).Date()
	if u == ratelimit.Month {
		return int64(year)*12 + int64(month) - 1
	}
	return time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Unix() / (24 * 60 * 60)
}

// beginning returns the first second of a date, or of the next existing date,
// between the seconds before (exclusive) and by (inclusive). It searches,
// because in some zones there is no midnight on the day that summer time
// begins, and a second one on the day that it ends.
func beginning(u ratelimit.Unit, date, before, by int64, location *time.Location) int64 {
	first := before + 1
	return first +
		int64(sort.Search(int(by-first), func(i int) bool { return dateOf(u, first+int64(i), location) >= date }))
}
