package openaiapi

import (
	"strings"
	"testing"
)

func TestWhichBodiesCanBeRead(t *testing.T) {
	for body, want := range map[string]bool{
		"":                                      true,
		`{}`:                                    true,
		"{ \"file_ids\" :\n[null] }":            true,
		"\xef\xbb\xbf{\"a\":1}":                 true,
		`{"a":1`:                                false,
		`{"a":1}{"file_id":"file-12345"}`:       false,
		`{/**/"file_id":"file-12345"}`:          false,
		`{"a":'"',"file_id":"file-12345"}`:      false,
		`["file-12345"]`:                        false,
		"\x00{\x00}":                            false,
		"{\x00}\x00":                            false,
		`"file-12345"`:                          false,
		`{"Previous_Response_ID":"resp_12345"}`: false,
		`{"input":[{"ID":"msg_12345"}],"file_\u0049ds":[]}`:                               false,
		`{"file\u017f":[{"file_id":"file-12345"}]}`:                                       false,
		`{"fileſ":[{"file_id":"file-12345"}]}`:                                            false,
		`{"metadata":{"File_ID":"file-12345"},"File_id":null,"store":false,"Store":true}`: true,
		"v=0\r\n":                              false,
		`{"input":[{"id":"msg_12345",}]}`:      false,
		`{"a":NaN,"file_id":"file-12345"}`:     false,
		`{"a":1,"previous_response_id":"res_"`: false,
	} {
		if got := ParseJSON([]byte(body), nil).Readable([]byte(body)); got != want {
			t.Errorf("%q can be read: %v", body, got)
		}
	}
	for fields, want := range map[string]bool{
		"prompt={\"a cat\":1}": true, "purpose=batch": true, "file_id=file-12345": true,
		"File_ID=file-12345": false, "file_ids[]=file-12345": false, "input_reference={\"file_id\":\"file-12345\"}": false, "input_reference[file_id]=file-12345": false,
	} {
		body := form(fields)
		if got := parseForm([]byte(body), "x").Readable([]byte(body)); got != want {
			t.Errorf("%s can be read: %v", fields, got)
		}
		for _, other := range []string{body[:len(body)-4], `{"file_id":"file-12345"}` + "\r\n" + body} {
			if parseForm([]byte(other), "x").Readable([]byte(other)) {
				t.Errorf("%q can be read", other)
			}
		}
		if ParseJSON([]byte(body), nil).Readable([]byte(body)) || parseForm([]byte(`{"a":1}`), "x").Readable([]byte(`{"a":1}`)) {
			t.Error("a body can be read that is no such body")
		}
	}
}

func TestATextInThePlaceOfAnIDIsSeen(t *testing.T) {
	for body, want := range map[string]string{
		`{"previous_response_id":"short"}`:                        `"short"`,
		`{"input":[{"id":"0123456789abcdef"}]}`:                   `"0123456789abcdef"`,
		`{"file_ids":["file-12345","",null,"x y"]}`:               `"x y"`,
		`{"previous_response_id":"resp_12345","conversation":""}`: "",
		`{"metadata":{"file_id":"short"},"input":"short"}`:        "",
	} {
		got, ok := ParseJSON([]byte(body), nil).OddID([]byte(body))
		if string(got) != want || ok != (want != "") {
			t.Errorf("%s: got %s", body, got)
		}
	}
	if got, ok := parseForm([]byte(form("file_id=short")), "x").OddID([]byte(form("file_id=short"))); !ok || string(got) != "short" {
		t.Errorf("in a form: got %s", got)
	}
}

// form is a form with a field, and a file of any name.
func form(field string) string {
	name, value, _ := strings.Cut(field, "=")
	return "--x\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value +
		"\r\n--x\r\nContent-Disposition: form-data; name=\"files[]\"; filename=\"f\"\r\n\r\n{\r\n--x--\r\n"
}
