package openaiapi

import (
	"fmt"
	"slices"
	"testing"
)

func TestWhatIsANewAPI(t *testing.T) {
	for operation, want := range map[string]bool{
		"/agents": true, "/agents/agent_68f0": true, "/live/sessions": true, "/messages/batches": true, "/chat/else": true, "/audio/voices": true,
		"": false, "/models/gpt-4o": false, "/chat/completions": false, "/messages": false, "/audio/speech": false, "/files/file-12345": false,
		"/realtime": false, "/realtime/calls": false, "/engines/davinci/completions": false, "/usage": false, "/responses/resp_12345": false,
	} {
		if got := IsNewAPI(operation); got != want {
			t.Errorf("%s: %v", operation, got)
		}
	}
}

func TestNamesInThePathOfANewAPI(t *testing.T) {
	for operation, want := range map[string]struct {
		names string
		odd   bool
	}{
		"/agents":                           {"[]", false},
		"/agents/":                          {"[]", false},
		"/live/client_secrets":              {"[client_secrets?]", false},
		"/audio/v2/speech":                  {"[v2? speech?]", false},
		"/agents/agent_68f0/versions/3":     {"[agent_68f0 versions? 3]", false},
		"/agents/agent%5F68f0":              {"[agent_68f0]", false},
		"/agents/Helper":                    {"[Helper]", false},
		"/agents/helper":                    {"[helper?]", false},
		"/agents/agent_1;agent_2":           {"[agent_1]", true},
		"/agents%2Fagent_1":                 {"[agent_1]", true},
		`/agents/agent_1\agent_2`:           {"[agent_1 agent_2]", true},
		"/vaults/my%20own":                  {"[my own]", false},
		"/threads2/x/messages_of/%E2%82%AC": {"[x? messages_of? €]", false},
	} {
		s := ReadStored("GET", operation, "")
		names := make([]string, len(s.Names))
		for i, n := range s.Names {
			if names[i] = n.Text; n.Word {
				names[i] += "?"
			}
		}
		if got := fmt.Sprint(names); got != want.names || s.OddPath != want.odd {
			t.Errorf("%s: got %s, odd %v", operation, got, s.OddPath)
		}
	}
}

func TestWhatAReplyOfANewAPIHasMade(t *testing.T) {
	for reply, want := range map[string][]string{
		`{"id":"agent_68f0"}`:                                                                       {"agent_68f0"},
		`{"id":"helper","session":{"id":"sess_68f0"}}`:                                              {"helper in /agents", "sess_68f0"},
		`{"session":{"id":"live-word","expires":1},"value":"ek_1"}`:                                 {"live-word and in /agents"},
		`{"id":7,"data":[{"id":"agent_1234"}]}`:                                                     nil,
		`{"metadata":{"id":"agent_1234"},"error":{"id":"err_12345"},"a":{"b":{"id":"agent_1234"}}}`: nil,
		`{"id":"with blank"}`:                                                                       nil,
		`[{"id":"agent_1234"}]`:                                                                     nil,
		`{"id":"agent_1234`:                                                                         nil,
	} {
		var got []string
		EachMade([]byte(reply), "/agents", func(n MadeName) {
			text := n.Text
			switch {
			case n.Scoped != "" && n.Global:
				text += " and in /agents"
			case n.Scoped != "":
				text += " in /agents"
			}
			got = append(got, text)
		})
		if !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", reply, got, want)
		}
	}
}
