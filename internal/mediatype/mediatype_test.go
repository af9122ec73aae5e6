package mediatype

import (
	"net/http"
	"testing"
)

func TestOf(t *testing.T) {
	for value, want := range map[string]string{
		"application/json":                  JSON,
		"Application/JSON;charset=utf-8":    JSON,
		" text/event-stream ; charset=x":    EventStream,
		`multipart/form-data; boundary="b"`: Form,
		"application/json-seq":              "application/json-seq",
		"":                                  "",
		";":                                 "",
	} {
		if got := Of(http.Header{"Content-Type": {value}}); got != want {
			t.Errorf("%q is taken for %q, want %q", value, got, want)
		}
	}
	if got := Of(nil); got != "" {
		t.Errorf("no header is taken for %q", got)
	}
}
