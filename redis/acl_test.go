package redis

import (
	"regexp"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

var (
	userRule     = regexp.MustCompile("(?m)^ACL SETUSER openai_lb (on >)secret (.*)$")
	sentinelRule = regexp.MustCompile("(?m)^ACL SETUSER watcher (on >)secret (.*)$")
	databaseRule = regexp.MustCompile("(?s)`db`[^`]*needs `([^`]*)`")
	clusterRule  = regexp.MustCompile("(?s)cluster it needs `([^`]*)`")
)

// documented are rules of a user that the README names.
func documented(t *testing.T, rule *regexp.Regexp) string {
	t.Helper()
	text := lbtest.ReadFile(t, "README.md")
	found := rule.FindSubmatch(text)
	if found == nil {
		t.Fatalf("the README has no %v", rule)
	}
	return strings.Join(strings.Fields(string(found[len(found)-1])), " ")
}

// as makes the engine that of a user with these rules, which begin with
// nothing.
func (s *server) as(e *Engine, rules string) *Engine {
	s.t.Helper()
	args := []any{"acl", "setuser", "openai_lb", "reset", "on", ">s3cret"}
	for _, rule := range strings.Fields(rules) {
		args = append(args, rule)
	}
	s.do(args...)
	e.Username, e.Password = "openai_lb", "s3cret"
	return e
}

// conformsAs tests what a user may do that has these rules, and that nothing
// else is tried.
func conformsAs(t *testing.T, e *Engine, rules string, servers ...*server) {
	t.Helper()
	for _, s := range servers {
		s.as(e, rules)
	}
	conforms(t, e, servers...)
	for _, s := range servers {
		if refused := s.do("acl", "log").([]any); len(refused) > 0 {
			t.Errorf("with the rules %q, this was refused: %v", rules, refused)
		}
	}
}

func TestTheUserOfTheDocsIsEnough(t *testing.T) {
	s := startServer(t)
	rules := documented(t, userRule)
	conformsAs(t, s.engine(), rules, s)
	e := s.engine()
	e.DB = 1
	conformsAs(t, e, rules+" "+documented(t, databaseRule), s)

	file := t.TempDir() + "/password"
	lbtest.WriteFile(t, file, "s3cret\n")
	e = s.as(s.engine(), rules)
	e.Password = "{file." + file + "}"
	wantUsable(t, open(t, e))
	if strings.Contains(rules, "@") {
		t.Errorf("the rules have a group of commands: %s", rules)
	}
}

func TestTheUserOfTheDocsIsEnoughForACluster(t *testing.T) {
	nodes := startCluster(t)
	e := &Engine{Address: []string{nodes[0].address}, Cluster: true}
	conformsAs(t, e, documented(t, userRule)+" "+documented(t, clusterRule), nodes...)
}
