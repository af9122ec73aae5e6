package sse

import (
	"bytes"
	"strings"
	"testing"
)

func TestAnErrorOrAUsageIsFoundWhereverItsEventDiffersFromThoseBefore(t *testing.T) {
	for _, member := range []string{`"error":{"code":1}`, `"error" : "x"`, `"usage":{"total_tokens":3}`} {
		for length := range 80 {
			for _, after := range []string{`,"more":1}`, `,"text":"` + strings.Repeat("x", shortData) + `"}`} {
				var w Watcher
				var tail []byte
				w.Each = func(e Event) { tail = bytes.Clone(e.Tail) }
				head := `{"x":"` + strings.Repeat("a", length) + `",`
				send := func(data string) { w.Watch([]byte("data: " + data + "\n\n")) }
				send(head + `"delta":1}`)
				send(head + member[:len(member)/2] + `-":1}`)
				send(head + strings.NewReplacer(`{"code":1}`, `null`, `"x"`, `null`, `{"total_tokens":3}`, `null`).Replace(member) + after)
				if w.Failure != nil {
					t.Fatalf("%s: a null is an error", head+member)
				}
				send(head + member + after)
				if isError := strings.Contains(member, "error"); isError != (w.Failure != nil) {
					t.Fatalf("%s after %d bytes: the failure is %v", member, len(head), w.Failure)
				}
				if !bytes.Contains(tail, []byte(member[1:6])) {
					t.Fatalf("%s after %d bytes is not in the tail %q", member, len(head), tail)
				}
			}
		}
	}
}

func TestOnlyThePartOfAnEventIsSearchedThatDiffersFromThoseBefore(t *testing.T) {
	head := `{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"gpt-4o","choices":[{"index":0,"delta":{`
	var w Watcher
	searched := 0
	w.Each = func(e Event) { searched = len(e.Tail) }
	for _, word := range []string{`"role":"assistant"`, `"content":"Hello"`, `"content":" there"`, `"content":"!"`} {
		w.Watch([]byte("data: " + head + word + "}}]}\n\n"))
	}
	if most := len(`"content":"!"}}]}`) + overlap; searched > most {
		t.Errorf("%d bytes are searched, want %d at most", searched, most)
	}
}

func FuzzTail(f *testing.F) {
	f.Add("data: {\"id\":\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\",\"error\":null}\n\n", `{"id":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","error":{"x":1}}`)
	f.Add("data: {\"id\":\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\",\"er\":null}\n\n", `{"id":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","usage":{"x":1}}`)
	f.Fuzz(func(t *testing.T, before, data string) {
		if strings.ContainsAny(data, "\r\n") {
			return
		}
		var w Watcher
		w.Watch([]byte(before))
		w.Watch([]byte("\n\n"))
		w.Each = func(e Event) {
			for _, name := range [][]byte{errorName, usageEnd} {
				if got, want := bytes.Count(e.Tail, name), bytes.Count(e.Data, name); got != want {
					t.Errorf("the tail %q of %q has %s %d times, want %d", e.Tail, e.Data, name, got, want)
				}
			}
		}
		w.Watch([]byte("data: " + data + "\n\n"))
	})
}
