package openaiapi

import "bytes"

// mediaTokens is how many tokens a picture, a recording or a file in a body
// counts as, because its length says nothing about its tokens.
const mediaTokens = 1000

const (
	// longestMediaType is the maximum length of a data: URL up to its data.
	longestMediaType = 256
	// shortestMedia is the length from which a text counts as a recording
	// because of its member's name and its characters.
	shortestMedia = 256
)

// promptTokens estimates the tokens of the prompt in a body of that length.
// Each data: URL in base64, and each recording, counts as mediaTokens; the rest
// counts by its length, as in PromptCost. It searches only for these, and does
// not parse the body again.
func promptTokens(body []byte, bodyLength int64) int64 {
	count, size := int64(0), int64(0)
	add := func(start, end int) {
		count, size = count+1, size+int64(end-start)
	}
	for at := 0; ; {
		n := bytes.Index(body[at:], base64Mark)
		if n < 0 {
			break
		}
		data := at + n + len(base64Mark)
		from := max(at, at+n-longestMediaType)
		start := bytes.LastIndexByte(body[from:at+n], '"')
		if start < 0 || !bytes.HasPrefix(body[from+start+1:], dataScheme) || !mayBeMedia(body[:from+start]) {
			at = data
			continue
		}
		at = endOfData(body, data)
		add(data, at)
	}
	for at := 0; len(body) >= mediaTokens*charsPerToken; { // a shorter recording counts for less by its bytes
		n := bytes.Index(body[at:], dataMember)
		if n < 0 {
			break
		}
		at += n + len(dataMember)
		colon := skipSpace(body, at)
		if colon >= len(body) || body[colon] != ':' {
			continue
		}
		if start := skipSpace(body, colon+1) + 1; start < len(body) && body[start-1] == '"' &&
			isBase64(body[start:min(len(body), start+shortestMedia)]) {
			at = endOfData(body, start)
			add(start, at)
		}
	}
	return PromptCost(max(bodyLength, int64(len(body)))-size) + count*mediaTokens
}

var (
	base64Mark = []byte(";base64,")
	dataScheme = []byte("data:")
	// dataMember is the name of the member that contains a recording (OpenAI's
	// chat), or a picture or a file (Anthropic's messages).
	dataMember = []byte(`"data"`)
)

// mayBeMedia reports whether a text after these bytes may be a picture, a
// recording or a file: it is a list item, or the name of its member ends like
// image_url, file_data or image. All other texts are part of the prompt, even
// if they look like a URL.
func mayBeMedia(before []byte) bool {
	before = bytes.TrimRight(before, whiteSpace)
	if bytes.HasSuffix(before, []byte("[")) || bytes.HasSuffix(before, []byte(",")) {
		return true
	}
	name, isMember := bytes.CutSuffix(before, []byte(":"))
	name, isName := bytes.CutSuffix(bytes.TrimRight(name, whiteSpace), []byte(`"`))
	return isMember && isName && (bytes.HasSuffix(name, []byte("url")) || bytes.HasSuffix(name, []byte("data")) ||
		bytes.HasSuffix(name, []byte("image")))
}

// whiteSpace is the white space of JSON.
const whiteSpace = " \t\r\n"

// endOfData returns the end of the base64 text that contains b[i]. Base64 has
// no escapes.
func endOfData(b []byte, i int) int {
	n := bytes.IndexByte(b[i:], '"')
	if n < 0 {
		return len(b)
	}
	return i + n
}

// isBase64 reports whether the beginning of a text looks like long base64 data.
func isBase64(text []byte) bool {
	if len(text) < shortestMedia {
		return false
	}
	for _, c := range text {
		switch {
		case 'a' <= c|0x20 && c|0x20 <= 'z', '0' <= c && c <= '9', c == '+', c == '/', c == '-', c == '_':
		default:
			return false
		}
	}
	return true
}
