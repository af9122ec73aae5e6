package statuspage

import (
	"compress/gzip"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// changed is what the page makes of its lines.
func changed(lines []string, all []change) []string {
	lines = slices.Clone(lines)
	for _, c := range all {
		lines = slices.Replace(lines, c.First, c.First+c.Number, c.Instead...)
	}
	return lines
}

func TestChangesMakeTheNewLines(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	list := func() []string {
		lines := make([]string, random.IntN(6))
		for i := range lines {
			lines[i] = string(rune('a' + random.IntN(3)))
		}
		return lines
	}
	for range 10_000 {
		was, is := list(), list()
		if got := changed(was, changes(was, is)); !slices.Equal(got, is) {
			t.Fatalf("%q becomes %q, want %q, by %+v", was, got, is, changes(was, is))
		}
	}
}

func TestOnlyTheLinesAreSentThatDiffer(t *testing.T) {
	for _, c := range []struct{ was, is, want string }{
		{"a b c d e", "a x y d z", `[[1,2,["x","y"]],[4,1,["z"]]]`},
		{"a b c", "a b new c", `[[2,0,["new"]]]`},
		{"a gone b c", "a b c", `[[1,1,[]]]`},
		{"<b>&", "<i>&", `[[0,1,["<i>&"]]]`},
	} {
		event := eventOf("change", changes(strings.Fields(c.was), strings.Fields(c.is)), time.Time{})
		if !strings.Contains(string(event), "\ndata: "+c.want+"\n\n") {
			t.Errorf("%s to %s is sent as %s, want %s", c.was, c.is, event, c.want)
		}
	}
}

func TestEventsAreCompressedForBrowsersThatWantThat(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		usePool(t, "p", "a")
		h, unload := newHandler(t, 1)
		w := &watcher{header: make(http.Header), over: make(chan error, 1)}
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/status?events", nil)
		r.Header.Set("Accept-Encoding", "gzip, deflate, br")
		go func() { w.over <- h.ServeHTTP(w, r, nil) }()
		synctest.Wait()
		w.mu.Lock()
		sent := strings.Join(w.events, "")
		w.mu.Unlock()
		if got := w.header.Get("Content-Encoding"); got != "gzip" {
			t.Fatalf("Content-Encoding is %q", got)
		}
		reader, err := gzip.NewReader(strings.NewReader(sent))
		if err != nil {
			t.Fatal(err)
		}
		event, _ := io.ReadAll(reader) // which goes on
		if text := string(event); !strings.HasPrefix(text, "id: ") || !strings.HasSuffix(text, "\n\n") || len(sent) > len(text)/2 {
			t.Errorf("%d bytes are sent for %d: %.200s", len(sent), len(text), text)
		}
		unload()
		<-w.over
	})
}

func TestMakingThePageTakesNoMoreThanASmallPartOfTheTime(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{
		0: interval / 2, time.Millisecond: interval / 2, 5 * time.Millisecond: time.Second, 15 * time.Millisecond: 3 * time.Second, time.Second: maxPause,
	} {
		if got := pauseAfter(took); got != want {
			t.Errorf("a page that took %s counts for %s, want %s", took, got, want)
		}
	}
}
