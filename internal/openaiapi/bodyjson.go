package openaiapi

import "bytes"

// ParseJSON reads the top-level members of a JSON object into a [Body]. A
// "model" that is not a string does not count, but With replaces null by a
// model. The prompt is recorded in p, unless p is nil.
//
// It is a scanner, not a parser. It goes over the bytes once, remembers only a
// depth, and jumps from quote to quote within strings, which are most of a
// prompt. It does not validate the parts that it skips: if a body is not quite
// JSON, or not UTF-8, the backend will reject it. Where the scanner cannot go
// on, it returns its findings so far. For a body that was cut off, these are
// the complete members. For valid JSON, the result is the same as from
// encoding/json with exact comparison of keys.
func ParseJSON(body []byte, p *Prompt) (b Body) {
	b.N = 1
	i := 0
	if bytes.HasPrefix(body, bom) {
		i = len(bom) // RFC 8259 section 8.1 lets a parser ignore it
	}
	i = skipSpace(body, i)
	if i >= len(body) || body[i] != '{' {
		// Only an object has members. A body that is cut within the BOM may
		// still become one.
		b.Whole = i < len(body) && !bytes.HasPrefix(bom, body)
		return b
	}
	w := walker{body: body}
	first := i + 1
	b.Clear = true
	namesModel := false // there is a "model", whatever its value
	optioned := false   // there are "stream_options"
	last := span{}      // of the last one's value, unless that is no string
	for {
		name, value := memberAt(body, i)
		at := inRequest.under(top, name)
		namesModel = namesModel || at == memberModel
		if value < 0 {
			b.Whole = endOf(body, i+1) > 0 // no member, or a comma too many
			break
		}
		if p != nil {
			w.prompt = p.begin(name)
		}
		end := -1
		if at != elsewhere {
			end = w.value(value, at, 1)
		}
		if end < 0 { // it is not quite JSON, or cut off
			end = skipValue(body, value)
			w.acts = w.acts || at != elsewhere
		}
		if end < 0 {
			break
		}
		w.acts = w.acts || hasEffect(top, at, name, body[value:end])
		switch at {
		case elsewhere:
		case memberOddModel:
			b.Clear = false
		case top, memberModels:
			b.addOther(furtherModels{span{value, end}, at == top})
		case memberModel:
			last = span{}
			if body[value] == '"' {
				last = span{value, end}
			}
			if last.end > 0 || string(body[value:end]) == "null" {
				b.addModel(span{value, end})
			}
		case memberServiceTier:
			b.addTier(readTier(body[value:end]), b.tiers.first.end > 0)
			if !b.tiers.add(span{value, end}) {
				b.Clear = false
			}
		case memberOddTier:
			b.addTier(OtherTier, true)
		case memberStreamOptions:
			b.StreamUsage, b.askUsage = readStreamOptions(body[value:end])
			b.askUsage.start, b.askUsage.end = b.askUsage.start+value, b.askUsage.end+value
			if optioned {
				b.askUsage = edit{}
			}
			optioned = true
		case memberMaxTokens, memberMaxCompletion, memberMaxOutput, memberN:
			if end < len(body) { // otherwise more digits may follow
				b.set(at, body[value:end])
			}
		default:
			b.set(at, body[value:end])
		}
		if p != nil {
			p.set(name, body[value:end])
		}
		if i = skipSpace(body, end); i >= len(body) || body[i] != ',' {
			b.Whole = i < len(body) && body[i] == '}'
			break
		}
	}
	b.objects, b.Acts = w.objects, w.acts
	if last.end > 0 {
		b.Model, b.HasModel = unquote(body[last.start:last.end])
	}
	if !namesModel {
		b.addFirst(body, first)
	}
	if next := skipSpace(body, first); next < len(body) && body[next] == '"' {
		if b.front = first; !optioned {
			b.askUsage = edit{span{first, first}, `"stream_options":{"include_usage":true},`}
		}
	}
	return b
}

// bom is a byte order mark.
var bom = []byte("\xef\xbb\xbf")

// addFirst records where a model can be added as the first member of the object
// whose members begin at i.
func (b *Body) addFirst(body []byte, i int) {
	next := skipSpace(body, i)
	if next >= len(body) {
		return
	}
	switch body[next] {
	case '"':
		b.models.addAt, b.models.before, b.models.after = i, `"model":`, ","
	case '}':
		b.models.addAt, b.models.before = i, `"model":`
	}
}

// readStreamOptions reads the value of "stream_options". usage reports whether
// the stream will contain its usage. ask is the edit that asks for it; its text
// is empty if that is not possible.
func readStreamOptions(value []byte) (usage bool, ask edit) {
	switch {
	case string(value) == "null":
		return false, edit{span{0, len(value)}, `{"include_usage":true}`}
	case value[0] != '{':
		return false, edit{}
	}
	ask = edit{span{1, 1}, `"include_usage":true`}
	named := false
	for i := 0; ; {
		name, start := memberAt(value, i)
		if start < 0 {
			if endOf(value, i+1) < 0 {
				ask = edit{}
			}
			return usage, ask
		}
		end := skipValue(value, start)
		if end < 0 {
			return usage, edit{}
		}
		if inRequest.under(memberStreamOptions, name) == memberIncludeUsage {
			usage = string(value[start:end]) == "true"
			if ask = (edit{span{start, end}, "true"}); named {
				ask.text = "" // it is unknown which of them a backend reads
			}
			named = true
		} else if ask.start == 1 {
			ask.text = `"include_usage":true,`
		}
		if i = skipSpace(value, end); i < len(value) && value[i] == '}' {
			return usage, ask
		}
	}
}
