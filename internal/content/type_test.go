package content

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
		if got := TypeOf(http.Header{"Content-Type": {value}}); got != want {
			t.Errorf("%q is taken for %q, want %q", value, got, want)
		}
	}
	for _, c := range []struct {
		values []string
		want   bool
	}{
		{nil, false},
		{[]string{""}, false},
		{[]string{JSON}, false},
		{[]string{"Application/JSON; charset=utf-8"}, false},
		{[]string{"text/plain"}, false},
		{[]string{"multipart/form-data; boundary=b"}, false},
		{[]string{"multipart/form-data; boundary=b; charset=ISO-8859-1"}, false},
		{[]string{`text/plain; charset="UTF-8"`}, false},
		{[]string{"application/json;charset=utf8 ; x=y"}, false},
		{[]string{"multipart/form-data; boundary=b; boundary*=UTF-8''c"}, true},
		{[]string{"multipart/form-data; boundary*0=b"}, true},
		{[]string{"multipart/form-data; boundary=b; charset=utf-7"}, true},
		{[]string{"application/json; charset=utf-16"}, true},
		{[]string{"application/json;charset=utf-8;charset = utf-7"}, true},
		{[]string{"application/json;charset*=utf-8''utf-7"}, true},
		{[]string{"Multipart/Mixed; boundary=b"}, true},
		{[]string{"application/x-www-form-urlencoded"}, true},
		{[]string{"application/json; x=multipart/form-data"}, true},
		{[]string{"application/json, multipart/form-data; boundary=b"}, true},
		{[]string{JSON, JSON}, true},
	} {
		if got := Disputed(http.Header{"Content-Type": c.values}); got != c.want {
			t.Errorf("%q is disputed: %t", c.values, got)
		}
	}
	if got := TypeOf(nil); got != "" {
		t.Errorf("no header is taken for %q", got)
	}
}
