package openaiapi

import (
	"net/http"
	"testing"
)

func TestTheTypeOfABody(t *testing.T) {
	for value, want := range map[string]string{
		"application/json":                  TypeJSON,
		"Application/JSON;charset=utf-8":    TypeJSON,
		" text/event-stream ; charset=x":    TypeEventStream,
		`multipart/form-data; boundary="b"`: typeForm,
		"application/json-seq":              "application/json-seq",
		"":                                  "",
		";":                                 "",
	} {
		if got := ContentType(http.Header{"Content-Type": {value}}); got != want {
			t.Errorf("%q is taken for %q, want %q", value, got, want)
		}
	}
	for _, c := range []struct {
		values []string
		want   bool
	}{
		{nil, false},
		{[]string{""}, false},
		{[]string{TypeJSON}, false},
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
		{[]string{TypeJSON, TypeJSON}, true},
	} {
		if got := DisputedType(http.Header{"Content-Type": c.values}); got != c.want {
			t.Errorf("%q is disputed: %t", c.values, got)
		}
	}
	if got := ContentType(nil); got != "" {
		t.Errorf("no header is taken for %q", got)
	}
}
