package openaiapi

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"mime"
	"mime/multipart"
	"net/textproto"
	"slices"
	"strings"
	"testing"
)

const (
	modelField = "Content-Disposition: form-data; name=\"model\"\r\n\r\n"
	textField  = "Content-Disposition: form-data; name=\"prompt\"\r\n\r\n"
	fileField  = "Content-Disposition: form-data; name=\"file\"; filename=\"a.mp3\"\r\nContent-Type: audio/mpeg\r\n\r\n"
)

// The forms below have the boundary XX. What WithModel replaces stands between
// « and »; a ¦ is where it adds a part.
var forms = []struct {
	name   string
	form   string
	model  string
	stream bool
}{
	{"the model first", "--XX\r\n" + modelField + "«whisper-1»\r\n--XX\r\n" + fileField + "ID3\x00\xff\r\n--XX--\r\n", "whisper-1", false},
	{"the model after the file", "--XX\r\n" + fileField + "ID3\x00\xff\r\n--XX\r\n" + modelField + "«whisper-1»\r\n--XX--\r\n", "whisper-1", false},
	{"a stream", "--XX\r\n" + modelField + "«m»\r\n--XX\r\nContent-Disposition: form-data; name=\"stream\"\r\n\r\ntrue\r\n--XX--\r\n", "m", true},
	{"the last stream holds", "¦--XX\r\nContent-Disposition: form-data; name=stream\r\n\r\ntrue\r\n--XX\r\nContent-Disposition: form-data; name=stream\r\n\r\nfalse\r\n--XX--\r\n", "", false},
	{"the last of two models holds, and both are replaced", "--XX\r\n" + modelField + "«a»\r\n--XX\r\n" + modelField + "«b»\r\n--XX--\r\n", "b", false},
	{"a name without quotes", "--XX\r\nContent-Disposition: form-data; name=model\r\n\r\n«m»\r\n--XX--", "m", false},
	{"headers in any case and order", "--XX\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-DISPOSITION:Form-Data ;NAME=\"model\"\r\nContent-Length: 1\r\n\r\n«m»\r\n--XX--", "m", false},
	{"a folded header", "--XX\r\nContent-Disposition: form-data;\r\n\tname=\"model\"\r\nX: 1\r\n 2\r\n\r\n«m»\r\n--XX--", "m", false},
	{"the first of two dispositions", "--XX\r\nContent-Disposition: form-data; name=model\r\nContent-Disposition: form-data; name=x\r\n\r\n«m»\r\n--XX--", "m", false}, // but not Clear
	{"an empty model is a model", "--XX\r\n" + modelField + "«»\r\n--XX--", "", false},
	{"white space belongs to it", "--XX\r\n" + modelField + "« m\r\n»\r\n--XX--", " m\r\n", false},
	{"a model that is no ASCII", "--XX\r\n" + modelField + "«ü\xff»\r\n--XX--", "ü\xff", false},
	{"white space after a boundary", "--XX \t\r\n" + modelField + "«m»\r\n--XX  \r\n" + textField + "p\r\n--XX-- ", "m", false},
	{"what only begins like a boundary", "--XX\r\n" + modelField + "«a\r\n--XXL\r\n--XX-\r\n--XX.\r\n--X\r\nXX»\r\n--XX--", "a\r\n--XXL\r\n--XX-\r\n--XX.\r\n--X\r\nXX", false},
	{"a boundary within a line is text", "--XX\r\n" + modelField + "«a--XX\r\n»\r\n--XX--", "a--XX\r\n", false},
	{"a preamble", "This is MIME.\r\n--XXL\r\n--XX\r\n" + modelField + "«m»\r\n--XX--", "m", false},
	{"an epilogue", "--XX\r\n" + modelField + "«m»\r\n--XX--\r\n--XX\r\n" + modelField + "x\r\n--XX--", "m", false},
	{"lines that end in LF", "--XX\nContent-Disposition: form-data; name=\"model\"\n\n«m»\n--XX\nContent-Disposition: form-data; name=\"prompt\"\n\na\r\n\n--XX--\n", "m", false},
	{"a part without headers", "--XX\r\n\r\nx\r\n--XX\r\n" + modelField + "«m»\r\n--XX--", "m", false},
	{"a part without anything", "--XX\r\n--XX\r\n" + modelField + "«m»\r\n--XX--", "m", false},
	{"a part without the empty line", "--XX\r\nContent-Disposition: form-data; name=stream\r\n--XX\r\n" + modelField + "«m»\r\n--XX--", "m", false},
	{"a form in a file", "¦--XX\r\n" + fileField + "--YY\r\n" + modelField + "x\r\n--YY--\r\n--XX--", "", false},
	{"a file whose name is model", "¦--XX\r\nContent-Disposition: form-data; name=\"model\"; filename=\"a.bin\"\r\n\r\nm\r\n--XX--", "", false},
	{"a file that has none", "¦--XX\r\nContent-Disposition: form-data; name=\"model\"; filename=\"\"\r\n\r\n\r\n--XX--", "", false},
	{"a file with a name in UTF-8", "¦--XX\r\nContent-Disposition: form-data; name=\"model\"; filename*=UTF-8''a%20b\r\n\r\n\r\n--XX--", "", false},
	{"an attachment", "¦--XX\r\nContent-Disposition: attachment; name=\"model\"\r\n\r\nm\r\n--XX--", "", false},
	{"names that only look alike", "¦--XX\r\nContent-Disposition: form-data; name=\"Model\"\r\n\r\nm\r\n--XX\r\nContent-Disposition: form-data; name=\"model \"\r\n\r\nm\r\n--XX\r\nContent-Disposition: form-data; name=\"models[]\"\r\n\r\nm\r\n--XX--", "", false},
	{"a disposition that cannot be read", "¦--XX\r\nContent-Disposition: form-data; name=\"model\r\n\r\nm\r\n--XX--", "", false},
	{"headers without end", "¦--XX\r\nX: " + strings.Repeat("x", maxPartHeaders) + "\r\n" + modelField + "m\r\n--XX--", "", false},
	{"no model, lines that end in LF", "¦--XX\nContent-Disposition: form-data; name=\"prompt\"\n\np\n--XX--\n", "", false},
	{"no model, a preamble", "MIME\r\n¦--XX\r\n" + textField + "p\r\n--XX--", "", false},
	{"no part at all, as Go writes it", "\r\n¦--XX--\r\n", "", false},
	{"no part and no more", "¦--XX--", "", false},

	// The beginning of a form that is too large to be held as a whole.
	{"cut off in the file", "--XX\r\n" + modelField + "«m»\r\n--XX\r\n" + fileField + "ID3", "m", false},
	{"cut off in the file that comes first", "¦--XX\r\n" + fileField + "ID3", "", false},
	{"cut off in the model", "--XX\r\n" + modelField + "whis", "", false},
	{"cut off in the boundary after the model", "--XX\r\n" + modelField + "whisper-1\r\n--X", "", false},
	{"cut off after the boundary after the model", "--XX\r\n" + modelField + "whisper-1\r\n--XX", "", false},
	{"cut off in the dashes after the model", "--XX\r\n" + modelField + "whisper-1\r\n--XX-", "", false},
	{"cut off in the second model", "--XX\r\n" + modelField + "«a»\r\n--XX\r\n" + modelField + "b", "a", false},
	{"cut off in the headers", "¦--XX\r\nContent-Disposition: form-data; name=\"mo", "", false},
	{"cut off in the first boundary", "--XX", "", false},

	// What is no form, or not this one.
	{"nothing", "", "", false},
	{"an object", `{"model":"m"}`, "", false},
	{"another boundary", "--YY\r\n" + modelField + "m\r\n--YY--", "", false},
}

func TestModelInAForm(t *testing.T) {
	for _, tt := range forms {
		t.Run(tt.name, func(t *testing.T) {
			body, spans := unmark(tt.form)
			got := parseForm(body, "XX")
			if got.Model != tt.model || got.HasModel != (len(spans) > 0) || got.Stream != tt.stream || !slices.Equal(placesOf(got), spans) {
				t.Fatalf("got %+v, want %+v with spans %v", got, tt, spans)
			}
			added := "--XX\r\n" + modelField + "ü <&>\r\n"
			if strings.HasPrefix(tt.form, "¦--XX\n") {
				added = strings.ReplaceAll(added, "\r\n", "\n")
			}
			want := replaceMarked(strings.ReplaceAll(tt.form, "¦", added), "ü <&>")
			if result := string(bytes.Join(got.With(body, Changes{Model: "ü <&>"}), nil)); result != want {
				t.Errorf("got %q, want %q", result, want)
			}
		})
	}
}

func TestTheOutputThatAFormAsksFor(t *testing.T) {
	field := func(name, value string) string {
		return "--XX\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
	}
	for _, tt := range []struct {
		form   string
		max, n int64
	}{
		{field("n", "3") + "--XX--", 0, 3},
		{field("n", "3") + field("n", "x") + "--XX--", 0, 1},
		{field("max_tokens", "5") + field("max_output_tokens", "70") + "--XX--", 70, 1},
		{field("max_tokens", "1e30") + "--XX--", math.MaxInt64, 1},
		{field("max_tokens", "") + field("n", "") + "--XX--", 0, 1},
		{field("max_tokens", "-1") + field("n", "two") + "--XX--", 0, 1},
		{strings.TrimSuffix(field("n", "3"), "\r\n"), 0, 1}, // cut off
		{"--XX\r\nContent-Disposition: form-data; name=\"n\"; filename=\"n\"\r\n\r\n3\r\n--XX--", 0, 1},
		{"", 0, 1},
	} {
		if r := parseForm([]byte(tt.form), "XX"); r.MaxOutput.Largest() != tt.max || r.N != tt.n {
			t.Errorf("%q: got %d times %d, want %d times %d", tt.form, r.N, r.MaxOutput.Largest(), tt.n, tt.max)
		}
	}
}

func TestWhetherMoreMayFollowAForm(t *testing.T) {
	for form, want := range map[string]bool{
		"--XX\r\n" + modelField + "m\r\n--XX--":             true,
		"--XX\r\n" + modelField + "m\r\n--XX--\r\nepilogue": true,
		"--XX--":             true,
		"preamble\r\n--XX--": true,
		"--XX\r\n" + modelField + "m\r\n--XX\r\n": false,
		"--XX\r\n" + modelField + "m\r\n--XX-":    false,
		"--XX\r\n" + modelField + "m\r\n--XX":     false,
		"--XX\r\n" + modelField + "m\r\n":         false,
		"--XX\r\n" + modelField:                   false,
		"--XX":                                    false,
		"preamble":                                false,
		"":                                        false,
	} {
		if r := parseForm([]byte(form), "XX"); r.Whole != want {
			t.Errorf("%q: got %v, want %v", form, r.Whole, want)
		}
	}
	// No parser has to read such a form, but some do, and nobody knows what
	// they find.
	long := strings.Repeat("b", maxBoundary+1)
	if parseForm([]byte("--"+long+"--"), long).Whole {
		t.Error("a form with too long a boundary counts as read")
	}
}

func TestWhichFormsAllServersReadInTheSameWay(t *testing.T) {
	const end = "\r\n--XX--\r\n"
	part := func(headers string) string { return "--XX\r\n" + headers + "\r\n\r\nm" }
	for name, form := range map[string]string{
		"a field and a file":                part(`Content-Disposition: form-data; name="model"`) + "\r\n--XX\r\n" + fileField + "ID3\x00\xff" + end,
		"a file of another field":           part(`Content-Disposition: form-data; name="image"; filename="a.png"`) + end,
		"a file with a quote in its name":   part(`Content-Disposition: form-data; name="image"; filename="a\"b\\.png"; filename*=UTF-8''a`) + end,
		"bytes that are what they are":      part("Content-Disposition: form-data; name=model\r\nContent-Transfer-Encoding: Binary") + end,
		"a folded header":                   part("Content-Disposition: form-data;\r\n name=model") + end,
		"white space after a boundary":      "--XX \r\n" + modelField + "m\r\n--XX-- ",
		"a preamble and an epilogue":        "MIME\r\n" + part("Content-Disposition: form-data; name=model") + end + "end",
		"lines that end in LF":              strings.ReplaceAll(part("Content-Disposition: form-data; name=model")+end, "\r", ""),
		"no part":                           "--XX--",
		"cut off in a value":                part("Content-Disposition: form-data; name=model"),
		"cut off in headers":                "--XX\r\n" + modelField + "m\r\n--XX\r\nContent-Disposition: form-data; na",
		"cut off in a boundary":             "--XX\r\n" + modelField + "m\r\n--X",
		"cut off after a boundary":          "--XX\r\n" + modelField + "m\r\n--XX",
		"cut off after a boundary's return": "--XX\r\n" + modelField + "m\r\n--XX\r",
	} {
		if r := parseForm([]byte(form), "XX"); !r.Clear {
			t.Errorf("%s: some servers may read it in another way", name)
		}
	}
	headers := "X: " + strings.Repeat("x", maxPartHeaders) + "\r\n"
	for name, form := range map[string]string{
		"two dispositions":                  part("Content-Disposition: form-data; name=x\r\nContent-Disposition: form-data; name=model") + end,
		"a disposition in a folded line":    part("Content-Disposition: form-data; name=x\r\n Content-Disposition: form-data; name=model") + end,
		"a disposition after a bare return": part("X: y\rContent-Disposition: form-data; name=model\r\nContent-Disposition: form-data; name=x") + end,
		"a bare line feed among headers":    part("Content-Disposition: form-data; name=x\nX: form-data; name=model") + end,
		"a bare line feed after headers":    part("Content-Disposition: form-data; name=model\n") + end,
		"a return where lines end in LF":    "--XX\nContent-Disposition: form-data; name=model\r\n\nm\n--XX--\n",
		"a space before the colon":          part(`Content-Disposition : form-data; name="model"`) + end,
		"a parameter twice":                 part(`Content-Disposition: form-data; name="model"; a=1; a=2`) + end,
		"a parameter without a name":        part(`Content-Disposition: form-data; name="model"; =`) + end,
		"an open quote":                     part(`Content-Disposition: form-data; name="model`) + end,
		"no disposition":                    part("X: y") + end,
		"another disposition":               part(`Content-Disposition: attachment; name="model"`) + end,
		"a model that is a file":            part(`Content-Disposition: form-data; name="model"; filename=""`) + end,
		"an id that is a file":              part(`Content-Disposition: form-data; name="file_id"; filename=""`) + end,
		"a name in two encodings":           part(`Content-Disposition: form-data; name="x"; name*=UTF-8''model`) + end,
		"a model that another name hides":   part(`Content-Disposition: form-data; name="model"; name*=UTF-8''x`) + end,
		"a name in pieces":                  part(`Content-Disposition: form-data; name*0="mod"; name*1="el"`) + end,
		"a name with a backslash":           part(`Content-Disposition: form-data; name="mo\del"`) + end,
		"a name in another's value":         part(`Content-Disposition: form-data; x="\"; name=model; y="`) + end,
		"a file in another's value":         part(`Content-Disposition: form-data; x="\"; name=model; y="; name="image"; filename="a"`) + end,
		"a value in base64":                 part("Content-Disposition: form-data; name=model\r\nContent-Transfer-Encoding: base64") + end,
		"a value in quoted-printable":       part("content-transfer-encoding : Quoted-Printable\r\nContent-Disposition: form-data; name=model") + end,
		"headers without an end":            "--XX\r\nContent-Disposition: form-data; name=model" + end,
		"long headers":                      part(headers+"Content-Disposition: form-data; name=model") + end,
		"long headers, cut off":             part(headers + "Content-Disposition: form-data; name=model"),
		"two dispositions, cut off":         part("Content-Disposition: form-data; name=x\r\nContent-Disposition: form-data; name=model"),
		"a form after its end":              part("Content-Disposition: form-data; name=x") + "\r\n--XX--y\r\n" + part("Content-Disposition: form-data; name=model") + end,
		"a boundary after another line end": part("Content-Disposition: form-data; name=x") + "\n" + part("Content-Disposition: form-data; name=model") + end,
		"a boundary in a preamble":          "--XX: y\r\n" + part("Content-Disposition: form-data; name=model") + end,
		"JSON before it":                    "{}\r\n" + part("Content-Disposition: form-data; name=model") + end,
	} {
		if r := parseForm([]byte(form), "XX"); r.Clear {
			t.Errorf("%s: all servers are to read it in the same way", name)
		}
	}
}

func TestABoundaryIsAsRFC2046HasIt(t *testing.T) {
	for boundary, want := range map[string]bool{
		"----WebKitFormBoundary7MA4": true, "a b'()+_,-./:=?": true, "a ": false, `a\b`: false, `a"b`: false, "a;b": false, "a*b": false, "ä": false,
	} {
		r := parseForm([]byte("--"+boundary+"\r\n"+modelField+"m\r\n--"+boundary+"--"), boundary)
		if r.Clear != want || r.HasModel != want {
			t.Errorf("%q: got %+v", boundary, r)
		}
	}
}

func TestABoundaryHasAtLeastOneAndAtMost70Characters(t *testing.T) {
	for length, want := range map[int]bool{0: false, 1: true, 70: true, 71: false} {
		boundary := strings.Repeat("b", length)
		body := []byte("--" + boundary + "\r\n" + modelField + "m\r\n--" + boundary + "--")
		r := parseForm(body, boundary)
		if replaced := len(r.With(body, Changes{Model: "x"})) > 1; r.HasModel != want || replaced != want {
			t.Errorf("%d: got %+v", length, r)
		}
	}
}

// A delimiter needs a line break before it, but some readers take one right
// after the headers.
func TestAModelCannotAddPartsToAForm(t *testing.T) {
	for _, form := range []string{
		"--XX\r\n" + modelField + "m\r\n--XX--",
		"--XX\r\n" + textField + "p\r\n--XX--",
	} {
		body := []byte(form)
		for _, model := range []string{"a\r\n--XX\r\n" + textField + "b", "a\nb", "a\r", "--XX", "--XX--", "a--XXb"} {
			pieces := parseForm(body, "XX").With(body, Changes{Model: model})
			if len(pieces) != 1 || string(pieces[0]) != form {
				t.Errorf("%q: got %q", model, pieces)
			}
		}
		if pieces := parseForm(body, "XX").With(body, Changes{Model: "--X: a\x00\"b"}); len(pieces) != 3 {
			t.Errorf("got %q", pieces)
		}
	}
}

func TestAFormThatAlreadySaysSoStaysWhole(t *testing.T) {
	body := []byte("--XX\r\n" + modelField + "m\r\n--XX--")
	if pieces := parseForm(body, "XX").With(body, Changes{Model: "m"}); len(pieces) != 1 {
		t.Errorf("got %q", pieces)
	}
}

func FuzzParseForm(f *testing.F) {
	for _, tt := range forms {
		body, _ := unmark(tt.form)
		f.Add(body, "XX", "gpt-4o")
	}
	f.Fuzz(func(t *testing.T, body []byte, boundary, model string) {
		if strings.ContainsAny(boundary, "\r\n") {
			return // as no header can hold
		}
		r := parseForm(body, boundary)
		checkPlaces(t, r, body)
		checkCost(t, r, body)
		if model == "" || strings.ContainsAny(model, "\r\n") || strings.Contains(model, "--"+boundary) {
			if pieces := r.With(body, Changes{Model: model}); len(pieces) != 1 || !bytes.Equal(pieces[0], body) {
				t.Errorf("%q: got %q", body, pieces)
			}
			return
		}
		result := withModel(t, r, body, model, model)
		if again := parseForm(result, boundary); (r.HasModel || r.models.before != "") && (again.Model != model || again.Stream != r.Stream) {
			t.Errorf("%q: got %+v, want %q", result, again, model)
		}
	})
}

type part struct{ name, file, content string }

// readForm reads a form with mime/multipart.
func readForm(t *testing.T, form []byte, boundary string) (parts []part) {
	t.Helper()
	for r := multipart.NewReader(bytes.NewReader(form), boundary); ; {
		p, err := r.NextRawPart()
		if errors.Is(err, io.EOF) {
			return parts
		}
		if err != nil {
			t.Fatalf("%q: %v", form, err)
		}
		content, err := io.ReadAll(p)
		if err != nil {
			t.Fatalf("%q: %v", form, err)
		}
		_, params, _ := mime.ParseMediaType(p.Header.Get("Content-Disposition"))
		parts = append(parts, part{params["name"], params["filename"], string(content)})
	}
}

// FuzzWithModelForm writes and reads forms with mime/multipart. Their fields
// are separated by zeros, and of each the first byte says what it is.
func FuzzWithModelForm(f *testing.F) {
	f.Add([]byte("mwhisper-1\x00fID3\xff\x00ttext"), "XX", "m")
	f.Add([]byte("fID3\r\n--XXL\x00mwhisper-1\x00strue"), "XX", "m")
	f.Add([]byte("ma\x00mb\x00uc\x00Md"), "a b'()+_,-./:=?", "--a")
	f.Add([]byte("t\r\n--X\x00f\n--"), "XX", "")
	f.Add([]byte(""), "XX", "m")
	f.Fuzz(func(t *testing.T, fields []byte, boundary, model string) {
		var form bytes.Buffer
		w := multipart.NewWriter(&form)
		if w.SetBoundary(boundary) != nil || bytes.Contains(fields, []byte("--"+boundary)) {
			return
		}
		var want []part
		var models []string
		stream := false
		for field := range bytes.SplitSeq(fields, []byte{0}) {
			if len(field) == 0 {
				continue
			}
			p := part{content: string(field[1:])}
			header := textproto.MIMEHeader{}
			switch field[0] {
			case 'm':
				p.name = "model"
				header.Set("Content-Disposition", `form-data; name="model"`)
			case 'u':
				p.name = "model"
				header["content-disposition"] = []string{"FORM-DATA;name=model;x=y"}
				header["Content-Type"] = []string{"text/plain; charset=utf-8"}
			case 's':
				p.name = "stream"
				header.Set("Content-Disposition", `form-data; name="stream"`)
				stream = p.content == "true"
			case 'f', 'M':
				p.name, p.file = map[byte]string{'f': "file", 'M': "model"}[field[0]], `a "b".mp3`
				header.Set("Content-Disposition", multipart.FileContentDisposition(p.name, p.file))
			default:
				p.name = "prompt"
				header.Set("Content-Disposition", `form-data; name="prompt"`)
			}
			pw, err := w.CreatePart(header)
			if err != nil {
				t.Fatal(err)
			}
			io.WriteString(pw, p.content)
			if p.name == "model" && p.file == "" {
				models = append(models, p.content)
				p.content = model
			}
			want = append(want, p)
		}
		w.Close()

		r := parseForm(form.Bytes(), boundary)
		if r.HasModel != (len(models) > 0) || r.HasModel && r.Model != models[len(models)-1] || r.Stream != stream {
			t.Fatalf("%q: got %+v, want %q, %v", form.Bytes(), r, models, stream)
		}
		if model == "" || strings.ContainsAny(model, "\r\n") || strings.Contains(model, "--"+boundary) {
			return
		}
		if len(models) == 0 {
			want = append([]part{{"model", "", model}}, want...)
		}
		result := bytes.Join(r.With(form.Bytes(), Changes{Model: model}), nil)
		if got := readForm(t, result, boundary); !slices.Equal(got, want) {
			t.Errorf("%q: got %q, want %q", result, got, want)
		}
	})
}

// transcription is an upload of 25 MiB, the most that OpenAI takes, as curl
// sends it.
func transcription(modelFirst bool) (form []byte, boundary string) {
	boundary = "------------------------d74496d66958873e"
	audio := make([]byte, 25<<20)
	rand.NewChaCha8([32]byte{}).Read(audio)
	model := "--" + boundary + "\r\n" + modelField + "whisper-1\r\n"
	var b bytes.Buffer
	if modelFirst {
		b.WriteString(model)
	}
	fmt.Fprintf(&b, "--%s\r\n%s%s\r\n", boundary, fileField, audio)
	if !modelFirst {
		b.WriteString(model)
	}
	fmt.Fprintf(&b, "--%s--\r\n", boundary)
	return b.Bytes(), boundary
}

func BenchmarkParseForm(b *testing.B) {
	for _, bb := range []struct {
		name       string
		modelFirst bool
	}{
		{"model before the file", true},
		{"model after the file", false},
	} {
		form, boundary := transcription(bb.modelFirst)
		b.Run(bb.name, func(b *testing.B) {
			b.SetBytes(int64(len(form)))
			b.ReportAllocs()
			for b.Loop() {
				if parseForm(form, boundary).Model != "whisper-1" {
					b.Fatal("not found")
				}
			}
		})
	}
	// The worst that can be sent: nothing but parts.
	b.Run("half a million parts", func(b *testing.B) {
		form := bytes.Repeat([]byte("--b\r\nContent-Disposition:form-data;name=x\r\n\r\n\r\n"), 500_000)
		b.SetBytes(int64(len(form)))
		b.ReportAllocs()
		for b.Loop() {
			parseForm(form, "b")
		}
	})
}
