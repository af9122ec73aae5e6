package affinity

import (
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

func TestTheFirstKeyThatIsThereCounts(t *testing.T) {
	p := new(pool.Pool)
	c, err := (&Options{PromptCache: &PromptCache{Headers: []string{"session-id", "X-Thread"}}}).OpenPromptCache("test", p, nil)
	if err != nil || p.Relocations == nil {
		t.Fatal(err, p.Relocations)
	}
	defer c.Close()
	const responses = "/responses"
	long := strings.Repeat("x", 5000)
	keyOf := func(operation, model, body string, headers ...string) uint64 {
		header := make(http.Header)
		for i := 0; i+1 < len(headers); i += 2 {
			header.Set(headers[i], headers[i+1])
		}
		prompt := new(openaiapi.Prompt)
		openaiapi.ParseJSON([]byte(body), prompt)
		return c.Key(header, operation, model, prompt, int64(len(body)))
	}
	everything := `{"prompt_cache_key":"k","conversation":"conv_1","input":"` + long + `"}`
	keys := []uint64{
		keyOf(responses, "m", everything, "Session-Id", "s", "X-Thread", "t"),
		keyOf(responses, "m", everything, "X-Thread", "t"),
		keyOf(responses, "m", everything),
		keyOf(responses, "m", `{"conversation":"conv_1","input":"`+long+`"}`),
		keyOf(responses, "m", `{"input":"`+long+`"}`),
		keyOf(responses, "another", `{"input":"`+long+`"}`),
	}
	for i, key := range keys {
		if key == 0 {
			t.Errorf("request %d has no key", i)
		}
		for n, other := range keys[:i] {
			if key == other {
				t.Errorf("requests %d and %d have one key", n, i)
			}
		}
	}
	for i, same := range []uint64{
		keyOf("/chat/completions/", "m", `{}`, "session-id", "s"),
		keyOf(responses, "m", `{}`, "session-id", "", "x-thread", "t"),
		keyOf(responses, "m", `{"prompt_cache_key":"k"}`),
		keyOf(responses, "m", `{"conversation":"conv_1"}`),
		keyOf(responses, "m", `{"stream":true,"input":"`+long+`"}`),
	} {
		if same != keys[i] {
			t.Errorf("request %d has another key than one like it", i)
		}
	}
	if key := keyOf("/embeddings", "m", everything, "session-id", "s"); key != 0 {
		t.Error("embeddings have a key")
	}
}

func TestWhetherThereIsAPromptCache(t *testing.T) {
	for name, c := range map[string]struct {
		options  *Options
		fallback *PromptCache
		want     bool
	}{
		"no options":                     {nil, nil, false},
		"other options":                  {new(Options), nil, false},
		"no options, with a fallback":    {nil, new(PromptCache), true},
		"other options, with a fallback": {new(Options), new(PromptCache), true},
		"asked for":                      {&Options{PromptCache: new(PromptCache)}, nil, true},
		"turned off":                     {&Options{PromptCache: &PromptCache{Off: true}}, new(PromptCache), false},
	} {
		p := new(pool.Pool)
		got, err := c.options.OpenPromptCache("test", p, c.fallback)
		if err != nil || (got != nil) != c.want || (p.Relocations != nil) != c.want {
			t.Errorf("%s: got %v, %v, %v", name, got, err, p.Relocations)
		}
		if !c.want && got.Key(http.Header{}, "/responses", "m", nil, 5000) != 0 || got.Close() != nil {
			t.Errorf("%s: there is something", name)
		}
	}
}

func TestWhereKeysMovedSurvivesUntilTheLastPoolIsGone(t *testing.T) {
	o := &Options{PromptCache: new(PromptCache)}
	open := func(name string) (*PromptCache, *pool.Relocations) {
		p := new(pool.Pool)
		c, err := o.OpenPromptCache(name, p, nil)
		if err != nil {
			t.Fatal(err)
		}
		return c, p.Relocations
	}
	old, oldMoves := open("one")
	other, otherMoves := open("other")
	defer other.Close()
	replaced, sameMoves := open("one")
	old.Close()
	if sameMoves != oldMoves || otherMoves == oldMoves {
		t.Error("a pool has the moves of another, or not its own")
	}
	replaced.Close()
	again, newMoves := open("one")
	defer again.Close()
	if newMoves == oldMoves {
		t.Error("moves are kept although no pool has them")
	}
}
