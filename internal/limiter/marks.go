package limiter

import "github.com/openai-lb/caddy-openai-lb/internal/ratelimit"

// marks are the percentages of a limit that are reported.
var marks = [...]uint8{100, 80}

// crosses returns the highest mark that the use has newly reached in this
// window, or 0.
func (m *counter) crosses(used, allowed int64) uint8 {
	for _, mark := range marks {
		if mark <= m.marked {
			return 0
		}
		if used >= allowed-allowed/100*int64(100-mark)-allowed%100*int64(100-mark)/100 {
			m.marked = mark
			return mark
		}
	}
	return 0
}

// crossed returns the marks that the use of any limit has newly reached.
func (c *Limiter) crossed(at int64) (crossed []ratelimit.Crossing) {
	for _, m := range c.all() {
		if m.limit.Amount > 0 && m.marked < 100 {
			used := m.use(at)
			allowed := c.shown(m, at, used)
			if mark := m.crosses(used, allowed); mark > 0 {
				crossed = append(crossed, m.crossing(c.name, mark, used, allowed))
			}
		}
	}
	return crossed
}

// reached appends a mark unless it was already reported in this window.
func (c *Limiter) reached(crossed []ratelimit.Crossing, id ratelimit.ID, mark uint8,
	used, allowed int64) []ratelimit.Crossing {
	m := &c.counters[id]
	if m.marked >= mark {
		return crossed
	}
	m.marked = mark
	return append(crossed, m.crossing(c.name, mark, used, allowed))
}

func (m *counter) crossing(caller string, mark uint8, used, allowed int64) ratelimit.Crossing {
	return ratelimit.Crossing{Caller: caller, Limit: m.limit, Percent: int(mark), Used: used, Allowed: allowed}
}

func (c *Limiter) report(crossed []ratelimit.Crossing) {
	if c.hook == nil {
		return
	}
	for _, x := range crossed {
		c.hook(x)
	}
}
