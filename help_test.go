package openailb_test

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// TestTheHelpOfEachCommandHasAnExampleAndAPageThatExists looks at all commands
// below `caddy openai-lb`.
func TestTheHelpOfEachCommandHasAnExampleAndAPageThatExists(t *testing.T) {
	root := &cobra.Command{Use: "openai-lb"}
	caddycmd.Commands()["openai-lb"].CobraFunc(root)
	page := regexp.MustCompile(`https://github\.com/openai-lb/caddy-openai-lb/blob/main/(\S+)#(\S+)`)
	seen := 0
	var look func(c *cobra.Command)
	look = func(c *cobra.Command) {
		seen++
		if !strings.HasPrefix(c.Example, "  caddy "+c.CommandPath()) {
			t.Errorf("the example of %q is %q", c.CommandPath(), c.Example)
		}
		var help bytes.Buffer
		c.SetOut(&help)
		if err := c.Help(); err != nil {
			t.Fatal(err)
		}
		link := page.FindStringSubmatch(help.String())
		if link == nil {
			t.Fatalf("the help of %q has no page: %s", c.CommandPath(), &help)
		}
		if text, err := os.ReadFile(link[1]); err != nil || !strings.Contains(string(text), "\n## Command line\n") || link[2] != "command-line" {
			t.Errorf("there is no page %s with this section (%v)", link[0], err)
		}
		for _, sub := range c.Commands() {
			look(sub)
		}
	}
	look(root)
	if seen < 13 {
		t.Errorf("there are %d commands", seen)
	}
}
