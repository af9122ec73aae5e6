package redis

import (
	"fmt"
	"regexp"
	"slices"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

var (
	stateBlock  = regexp.MustCompile(`(?ms)^\s*state (?:redis \{.*?|regions \{.*?^\s*\}\n)^\s*\}$`)
	stateObject = regexp.MustCompile(`"state": (\{.*\})`)
	synopsis    = regexp.MustCompile("(?ms)^```text\n.*?^```")
)

func TestEveryEngineInTheDocsIsValid(t *testing.T) {
	t.Setenv("REDIS_PASSWORD", "s3cret")
	t.Setenv("REDIS_EAST_PASSWORD", "s3cret")
	t.Setenv("REDIS_WEST_PASSWORD", "s3cret")
	t.Setenv("REDIS_NODES", "a.internal:6379 b.internal:6379")
	found := 0
	for _, file := range []string{"../docs/replicas.md", "../docs/regions.md", "../examples/regions/east.Caddyfile", "../examples/regions/west.Caddyfile",
		"../examples/redis/Caddyfile", "../examples/forty-teams/Caddyfile", "../examples/production/Caddyfile", "README.md"} {
		text := lbtest.ReadFile(t, file)
		text = synopsis.ReplaceAll(text, nil)
		for _, block := range stateBlock.FindAllString(string(text), -1) {
			found++
			config, err := lbtest.Adapt("http://lb {\nopenai_lb {\nbackend http://a\n" + block + "\n}\n}")
			if err != nil {
				t.Fatalf("%s: %v in %s", file, err, block)
			}
			if err := lbtest.Validate(t, config); err != nil {
				t.Errorf("%s: %v in %s", file, err, block)
			}
		}
		for _, object := range stateObject.FindAllStringSubmatch(string(text), -1) {
			found++
			config := `{"apps":{"http":{"servers":{"lb":{"routes":[{"handle":[{"handler":"openai_lb","backends":[{"url":"http://a"}],"state":` + object[1] + `}]}]}}}}}`
			if err := lbtest.Validate(t, config); err != nil {
				t.Errorf("%s: %v in %s", file, err, object[1])
			}
		}
	}
	if found < 9 {
		t.Errorf("found %d engines in the docs, expected more", found)
	}
}

func TestTheExampleForgetsIdsAsTheDocsSay(t *testing.T) {
	settings := regexp.MustCompile(`(?m)^(maxmemory\S*) (\S+)$`).FindAllStringSubmatch(read(t, "../docs/replicas.md"), -1)
	command := regexp.MustCompile(`command: \[redis-server, (.*)\]`).FindStringSubmatch(read(t, "../examples/redis/compose.yaml"))
	if len(settings) != 2 || command == nil {
		t.Fatalf("found %q in the docs, %q in the example", settings, command)
	}
	for _, setting := range settings {
		if option := fmt.Sprintf("--%s, %s", setting[1], setting[2]); !slices.Contains(regexp.MustCompile(`--\S+, [^ ,]+`).FindAllString(command[1], -1), option) {
			t.Errorf("the example has not %q: %s", option, command[1])
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text := lbtest.ReadFile(t, file)
	return string(text)
}
