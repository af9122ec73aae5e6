package openaiapi

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// list is a JSON list of n ids, each with an escape or without.
func list(n int, escaped bool) string {
	var b strings.Builder
	for i := range n {
		if escaped {
			fmt.Fprintf(&b, `,"f\u005f%07d"`, i)
		} else {
			fmt.Fprintf(&b, `,"f_%07d"`, i)
		}
	}
	return "[" + b.String()[1:] + "]"
}

// formOf is a form with n of these fields.
func formOf(n int, field, value string) string {
	return strings.Repeat("--b\r\nContent-Disposition: form-data; name=\""+field+"\"\r\n\r\n"+value+"\r\n", n) + "--b--\r\n"
}

func TestABodyMayNameAThousandIDs(t *testing.T) {
	for _, n := range []int{999, 1000, 1001, 5000} {
		for name, r := range map[string]Body{
			"a list":               ParseJSON([]byte(`{"file_ids":`+list(n, false)+`}`), nil),
			"a list with escapes":  ParseJSON([]byte(`{"file_ids":`+list(n, true)+`}`), nil),
			"items":                ParseJSON([]byte(`{"input":[`+strings.Repeat(`{"id":"msg_12345"},`, n-1)+`{"id":"msg_12345"}]}`), nil),
			"places of every kind": ParseJSON([]byte(`{"previous_response_id":"resp_12345","file_ids":`+list(n-1, false)+`}`), nil),
			"a form":               parseForm([]byte(formOf(n, "file_id", "file-12345")), "b"),
		} {
			if r.TooManyIDs() != (n > MaxIDs) || len(r.objects.ids) > 1000+1 {
				t.Errorf("%s of %d has %d ids, too many: %t", name, n, len(r.objects.ids), r.TooManyIDs())
			}
			if !r.Whole {
				t.Errorf("%s of %d is not read to its end", name, n)
			}
		}
	}
	const texts = 5000
	r := ParseJSON([]byte(`{"file_ids":[`+strings.Repeat(`"auto",`, texts)+`"auto"],"messages":`+list(texts, false)+`}`), nil)
	if r.TooManyIDs() || len(r.objects.ids) > 0 {
		t.Errorf("what are no ids are %d", len(r.objects.ids))
	}
}

func TestOfAReplyAThousandIDsAreRead(t *testing.T) {
	n := 0
	EachIDInReply([]byte(`{"data":[{"id":"file-12345"}`+strings.Repeat(`,{"id":"file-12345"}`, 5000)+`]}`), func(IDKind, bool, []byte) { n++ })
	if n != 1000 {
		t.Errorf("%d ids are read, want %d", n, 1000)
	}
}

// However many ids a body is made of, reading it takes the memory of the first
// thousand.
func TestABodyMadeOfIDsTakesNoMoreMemoryThanAnother(t *testing.T) {
	const size = 8 << 20
	for name, body := range map[string]string{
		"ids":              `{"model":"m","file_ids":` + list(size/12, false) + `}`,
		"ids with escapes": `{"model":"m","file_ids":` + list(size/17, true) + `}`,
		"items":            `{"model":"m","input":[{"id":"msg_12345"}` + strings.Repeat(`,{"id":"msg_12345"}`, size/19) + `]}`,
		"models":           `{"model":"m"` + strings.Repeat(`,"model":"m"`, size/12) + `}`,
	} {
		text := []byte(body)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		r := ParseJSON(text, nil)
		pieces := r.With(text, Changes{Model: "another"})
		runtime.ReadMemStats(&after)
		if used := after.TotalAlloc - before.TotalAlloc; used > 512<<10 {
			t.Errorf("%s: reading %d bytes took %d bytes of memory (%d pieces)", name, len(text), used, len(pieces))
		}
	}
}
