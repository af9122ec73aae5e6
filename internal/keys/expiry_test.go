package keys

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// expiring returns clients whose file has these lines, and their log, in a
// bubble, where it is midnight UTC on 2000-01-01.
func expiring(t *testing.T, location *time.Location, lines ...string) (*Clients, *observer.ObservedLogs) {
	t.Helper()
	core, log := observer.New(zap.WarnLevel)
	file := filepath.Join(t.TempDir(), "keys")
	write(t, file, strings.Join(lines, "\n")+"\n")
	c, err := NewClients(ClientsConfig{File: &file, Location: location, Label: strings.ToUpper, Logger: zap.New(core)})
	if err != nil {
		t.Fatal(err)
	}
	return c, log
}

func TestAKeyIsValidUntilTheEndOfItsDay(t *testing.T) {
	for _, zone := range []struct {
		*time.Location
		ends time.Duration
	}{
		{time.UTC, 72 * time.Hour},
		{time.FixedZone("east", 3600), 71 * time.Hour},
		{time.FixedZone("west", -3600), 73 * time.Hour},
	} {
		bubble.Test(t, func(t *testing.T) {
			c, _ := expiring(t, zone.Location, "alice "+long("one")+" expires=2000-01-03", "alice "+long("two"), "bob "+long("three"))
			time.Sleep(zone.ends - 1)
			if who, err := c.Identify(t.Context(), bearer(long("one"))); who.Name != "alice" || err != nil {
				t.Errorf("%s: on its last day, the key is that of %v (%v)", zone, who, err)
			}
			time.Sleep(time.Nanosecond)
			if who, err := c.Identify(t.Context(), bearer(long("one"))); who.Name != "" || err != ErrExpired {
				t.Errorf("%s: after it, the key is that of %v (%v)", zone, who, err)
			}
			for _, other := range []string{"two", "three"} {
				presented := bearer(long("one"))
				presented.Header = append(presented.Header, bearer(long(other)).Header...)
				if who, err := c.Identify(t.Context(), presented); who.Name == "" || err != nil || len(presented.Header) > 0 {
					t.Errorf("%s: next to an expired key, another one is that of %v (%v), and %v is left", zone, who, err, presented.Header)
				}
			}
		})
	}
}

func TestAKeyThatExpiresSoonIsLoggedOnceADay(t *testing.T) {
	lines := []string{"alice " + long("one") + " expires=2000-01-10", "bob " + long("two") + " expires=2001-01-01"}
	for name, change := range map[string]func(*testing.T, *Clients, int) *Clients{
		"as the file stays": func(_ *testing.T, c *Clients, _ int) *Clients { return c },
		"as the file gets another key each hour": func(t *testing.T, c *Clients, hour int) *Clients {
			write(t, c.file, strings.Join(append(lines, "carol "+long(fmt.Sprint("three", hour))), "\n")+"\n")
			return c
		},
		"as the config is reloaded each hour": func(t *testing.T, c *Clients, _ int) *Clients {
			next, err := NewClients(c.config)
			if err != nil {
				t.Fatal(err)
			}
			return next
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				c, log := expiring(t, time.UTC, lines...)
				for hour := range 12 * 24 { // until 2000-01-13
					c = change(t, c, hour)
					if err := c.Read(); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Hour)
				}
				entries := log.FilterMessage("client key expires soon").All()
				if len(entries) != 7 {
					t.Errorf("it was logged %d times, want each day of the last week", len(entries))
				}
				for _, entry := range entries {
					fields := entry.ContextMap()
					if fields["caller"] != "alice" || fields["expires"] != "2000-01-11T00:00:00Z" || len(fields) != 2 {
						t.Errorf("it logged %v", fields)
					}
				}
			})
		})
	}
}
