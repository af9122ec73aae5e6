package affinity

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// placesOfIDs are where requests name objects, and placesOfText where the same
// words are the user's.
var (
	placesOfIDs = []string{
		`"previous_response_id":ID`, `"conversation":ID`, `"conversation":{"id":ID}`, `"input":[1.5e3,{"id":"x"}],"input":[{"type":"item_reference","id":ID}]`,
		`"input":[null,[1],{"summary":[],"encrypted_content":ID}]`, `"input":["text",{"role":"user","content":[{"text":"a"},{"file_id":ID}]}]`,
		`"input":[{"output":[{"file_id":ID}]}]`, `"messages":[{"content":[{"file":{"file_id":ID}}]}]`, `"messages":[{"attachments":[{"file_id":ID}]}]`,
		`"tools":[{"type":"file_search","vector_store_ids":["vs_NEW",ID]}]`, `"tools":[{"container":{"type":"auto","file_ids":[ID]}}]`,
		`"tools":[{"container":ID}]`, `"tool_resources":{"code_interpreter":{"file_ids":[ID]}}`, `"tool_resources":{"file_search":{"vector_store_ids":[ID]}}`,
		`"input_file_id":ID`, `"training_file":ID`, `"file_ids":[null,ID]`, `"thread":{"messages":[{"attachments":[{"file_id":ID}]}]}`, `"items":[{"id":ID}]`,
		`"prompt":{"id":ID}`, `"prompt":{"variables":{"id":{"file_id":ID}}}`, `"session":{"prompt":{"id":ID}}`, `"messages":[{"audio":{"id":ID}}]`, `"video":{"id":ID}`,
		`"tools":[{"environment":{"container_id":ID}}]`, `"input":[{"approval_request_id":ID}]`,
	}
	placesOfText = []string{
		`"metadata":{"file_id":ID,"previous_response_id":ID}`, `"instructions":ID`, `"input":ID`, `"input":[{"content":[{"text":ID}]}]`,
		`"tools":[{"parameters":{"file_id":ID,"properties":{"id":{"enum":[ID]}}}}]`, `"input":[{"arguments":ID,"name":"file_id"}]`, `"user":ID`,
		`"messages":[{"content":ID,"name":"file_id"}]`, `"text":{"format":{"schema":{"file_ids":[ID]}}}`, `"input":"\"previous_response_id\":RAW"`,
		`"input":[[{"id":ID}]]`, `"prompt":{"variables":{"file_id":ID}}`, `"unheard_of":{"file_id":ID}`, `"prompt":ID`, `"audio":{"id":ID}`,
	}
	pathsOfIDs = []string{"/v1/responses/ID", "/v1/files/ID/content", "/openai/v1/vector_stores/vs_NEW/files/ID", "/v1/files?after=ID", "/openai/threads/ID/runs?api-version=1"}
)

// FuzzOwners sends requests with ids in odd places. Whatever they are, no
// account gets a request that names what another one owns, and nobody is kept
// from an account by what is only text.
func FuzzOwners(f *testing.F) {
	for seed := range 60 {
		data := make([]byte, 80)
		for i := range data {
			data[i] = byte((seed+3)*(i+5)*(i^seed) + i/3 + seed)
		}
		f.Add(data)
	}
	f.Fuzz(sendIDsInOddPlaces)
}

// TestIDsInOddPlacesFindTheirOwners is FuzzOwners without its coverage.
func TestIDsInOddPlacesFindTheirOwners(t *testing.T) {
	source := rand.New(rand.NewPCG(3, 4))
	for range 150 {
		data := make([]byte, 200)
		for i := range data {
			data[i] = byte(source.Uint32())
		}
		if sendIDsInOddPlaces(t, data); t.Failed() {
			t.Fatalf("it goes wrong with\ngo test fuzz v1\n[]byte(%q)", data)
		}
	}
}

func sendIDsInOddPlaces(t *testing.T, data []byte) {
	inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b\nbackend http://c\n}", func(t *testing.T, w *world) {
		c := &choices{data}
		all := w.accounts("a", "b", "c")
		var owned [][2]string // ids and their owners
		for range 4 {
			id, home := w.make("", "/v1/files", "{}")
			owned = append(owned, [2]string{id, home})
		}
		for len(c.bytes) > 0 {
			for _, a := range all {
				a.requests()
			}
			owners := make(map[string]bool)
			var members []string
			for range c.of(4) {
				pick := owned[c.of(len(owned))]
				if c.one(3) {
					members = append(members, c.member(placesOfText[c.of(len(placesOfText))], pick[0]))
					continue
				}
				owners[pick[1]] = true
				members = append(members, c.member(placesOfIDs[c.of(len(placesOfIDs))], pick[0]))
			}
			method, path := "POST", "/v1/responses"
			if c.one(3) {
				pick := owned[c.of(len(owned))]
				owners[pick[1]] = true
				method, path = []string{"GET", "POST", "DELETE"}[c.of(3)], c.renew(strings.Replace(pathsOfIDs[c.of(len(pathsOfIDs))], "ID", pick[0], 1))
			}
			body := "{" + strings.Join(members, []string{",", " ,\n"}[c.of(2)])
			if !c.one(5) {
				body += "}" // sometimes it is cut off
			}
			reply := w.call("", method, path, body)
			for name, a := range all {
				if asked := a.requests(); len(asked) > 0 && len(owners) > 0 && (len(owners) > 1 || !owners[name]) {
					t.Errorf("%s %s %s is %v's, and %s was asked %q", method, path, body, owners, name, asked)
				}
			}
			if refused := strings.Contains(reply.Body, "objects_in_different_accounts"); refused != (len(owners) > 1) {
				t.Errorf("%s %s %s is %v's, and client got %d %s", method, path, body, owners, reply.Status, reply.Body)
			}
		}
	})
}

// member writes an id in a place, with some of its letters and those of the
// keys escaped.
func (c *choices) member(place, id string) string {
	quoted := `"` + id + `"`
	if c.one(3) {
		at := c.of(len(id))
		quoted = fmt.Sprintf(`"%s\u%04x%s"`, id[:at], id[at], id[at+1:])
	}
	if c.one(3) {
		place = strings.ReplaceAll(place, "file_id", `fi\u006ce\u005Fid`)
		place = strings.ReplaceAll(place, "previous", `\u0070revious`)
	}
	place = c.renew(place)
	return strings.NewReplacer("RAW", `\"`+id+`\"`, "ID", quoted, ":", []string{":", " : "}[c.of(2)]).Replace(place)
}

// renew puts an id there that nobody has heard of.
func (c *choices) renew(text string) string {
	return strings.ReplaceAll(text, "NEW", fmt.Sprintf("of_nobody_%d", len(c.bytes)))
}

// choices makes decisions of a fuzzer's bytes. When they are used up, every
// decision is the first one.
type choices struct{ bytes []byte }

func (c *choices) of(n int) int {
	if len(c.bytes) == 0 {
		return 0
	}
	first := c.bytes[0]
	c.bytes = c.bytes[1:]
	return int(first) % n
}

func (c *choices) one(in int) bool { return c.of(in) == in-1 }
