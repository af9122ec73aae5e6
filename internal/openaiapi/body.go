package openaiapi

import (
	"bytes"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Body is the parsed body of a request: the values that matter, and their
// places. The zero Body stands for a body that was not read: it names no model,
// and With cannot add one.
type Body struct {
	// Model is the value of "model". If there are several, the last one counts,
	// as in the providers' parsers.
	Model string

	// ServiceTier is the "service_tier". It is empty if that is absent or null.
	// It is [OtherTier] if the tier is not known, or if the body may name two.
	ServiceTier string

	// N is the number of requested replies: the last "n", or 1 if that is
	// absent or not a positive whole number.
	N int64

	// MaxOutput limits the tokens of the reply.
	MaxOutput MaxOutput

	// HasModel reports whether there is a model, even an empty one.
	HasModel bool

	// OddTier reports whether some servers may read another service tier than
	// ServiceTier.
	OddTier bool

	// Stream reports whether the last "stream" is true.
	Stream bool

	// Stores reports whether the last "store" is true, and StoresNot whether it
	// is false.
	Stores, StoresNot bool

	// Background reports whether any "background" is neither false nor null,
	// because vLLM reads 1 and "yes" as true (Pydantic, "Conversion Table"). In
	// that case, a response may go on after the reply.
	Background bool

	// Acts reports whether the request may have an effect besides its answer.
	// It does if it names a stored object that may act, or a tool or an item
	// that is not known to have no effect.
	Acts bool

	// Speaks reports whether the last "audio" asks for an audio reply, which
	// has an id.
	Speaks bool

	// Whole reports whether nothing after the bytes that were read can change
	// the fields above: the object or the form ends there, or the bytes begin
	// with something else, such as an array or a picture. It is false for a
	// body that was cut off, and for one whose syntax errors hide the end. It
	// is also false for an empty body and for only white space, because an
	// object may follow.
	Whole bool

	// Clear reports whether the body is an object or a form in which all
	// servers find exactly the models that With replaces. If the body was cut
	// off, this is about the received part only.
	Clear bool

	// StreamUsage reports whether the stream will contain its usage, because
	// the last "include_usage" of the last "stream_options" is true.
	StreamUsage bool

	// askUsage is the edit that asks for the usage of the stream. Its text is
	// empty if that is not possible.
	askUsage edit

	// models, tiers and objects are the places where the body names its model,
	// its service tier, and stored objects.
	models  models
	tiers   places
	objects objects

	// others are the places of further models: fallbacks, and the settings of a
	// session.
	others []furtherModels

	// inSession reports whether models has the models of a session, which are
	// members of an inner object or of a form field.
	inSession bool

	// front is where a member can be added before the first one. It is 0 if
	// none can be added.
	front int

	// form is the body's form. It is nil if the body is not a form.
	form *formBody
}

// MaxOutput is the largest number of tokens of a reply. It has the largest
// value of each member that limits it, or 0 without one. Which member counts
// depends on the API. Values that are not numbers or are negative do not count,
// and fractions are cut off.
type MaxOutput struct {
	// Tokens is the value of "max_tokens", Completion of
	// "max_completion_tokens", and Output of "max_output_tokens".
	Tokens, Completion, Output int64
}

// Largest returns the largest value of all members.
func (m MaxOutput) Largest() int64 { return max(m.Tokens, m.Completion, m.Output) }

// places are the places of the values that With replaces.
type places struct {
	// first is the first place. Its end is 0 if there is none. others are all
	// further places, which hardly any body has.
	first  span
	others []span
}

// models are the places where a body names its model by a string or null, and
// the place where a model can be added.
type models struct {
	places

	// before and after are the texts around a model that is added at addAt. If
	// before is empty, none can be added.
	before, after string
	addAt         int
}

// objects are the places where a body names stored objects.
type objects struct {
	// ids are the places of ids. odd is the place of a text that stands where
	// an id is expected, but does not look like one.
	ids []id
	odd span
}

// edit is a splice with a fixed text.
type edit struct {
	span
	text string
}

// span is a range of bytes, from start up to but not including end. The end is
// never 0.
type span struct{ start, end int }

// charsPerToken is how many bytes of a prompt count as one token.
const charsPerToken = 4

// Cost estimates how many tokens the request counts as in a rate limit: its
// prompt and the largest output that it asks for. Azure estimates in the same
// way, before it knows the length of the reply (Microsoft Learn, "Manage Azure
// OpenAI quota"). bodyLength is the length of the whole body, or negative if it
// is not known. A cost that does not fit an int64 becomes the largest int64.
func (b Body) Cost(bodyLength int64) int64 {
	prompt := PromptCost(bodyLength)
	output, n := b.MaxOutput.Largest(), max(b.N, 1)
	if output > (math.MaxInt64-prompt)/n {
		return math.MaxInt64
	}
	return prompt + output*n
}

// PromptCost estimates the tokens of the prompt in a body of that length.
func PromptCost(bodyLength int64) int64 { return max(bodyLength, 0) / charsPerToken }

// set records the value of any member other than the model.
func (b *Body) set(at place, value []byte) {
	switch at {
	case memberStream:
		b.Stream = string(value) == "true"
	case memberStore:
		b.Stores, b.StoresNot = string(value) == "true", string(value) == "false"
	case memberBackground:
		b.Background = b.Background || string(value) != "false" && string(value) != "null"
	case memberAudio:
		b.Speaks = bytes.HasPrefix(value, []byte("{"))
	case memberMaxTokens:
		b.MaxOutput.Tokens = largest(b.MaxOutput.Tokens, value)
	case memberMaxCompletion:
		b.MaxOutput.Completion = largest(b.MaxOutput.Completion, value)
	case memberMaxOutput:
		b.MaxOutput.Output = largest(b.MaxOutput.Output, value)
	case memberN:
		b.N = 1
		if f, ok := parseNumber(value); ok && f >= 1 && f == math.Trunc(f) {
			b.N = saturate(f)
		}
	}
}

// largest returns the larger of before and the number.
func largest(before int64, number []byte) int64 {
	f, ok := parseNumber(number)
	if !ok {
		return before
	}
	return max(before, saturate(f))
}

// longestNumber limits the length of a number. Longer ones are ignored.
const longestNumber = 400

// parseNumber parses a non-negative decimal number. A number that is too large
// for a float64 is infinite.
func parseNumber(text []byte) (float64, bool) {
	if len(text) == 0 || len(text) > longestNumber {
		return 0, false
	}
	whole, digits := int64(0), true // the usual case: a few digits
	for _, c := range text {
		if '0' <= c && c <= '9' {
			whole = whole*10 + int64(c-'0')
			continue
		}
		digits = false
		// ParseFloat would also take words, hexadecimal numbers and underscores
		if c != '.' && c != 'e' && c != 'E' && c != '+' && c != '-' {
			return 0, false
		}
	}
	if digits && len(text) <= 15 { // which a float64 holds exactly
		return float64(whole), true
	}
	f, err := strconv.ParseFloat(string(text), 64)
	return f, (err == nil || math.IsInf(f, 1)) && f >= 0
}

// saturate converts a non-negative number to an int64. If it is too large, it
// returns the largest int64.
func saturate(f float64) int64 {
	if f >= math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(f)
}

// maxModels is how many further models of a body are recorded.
const maxModels = 100

// add records a place. It reports false if there are too many, because
// replacing only some of them would not help.
func (p *places) add(s span) bool {
	switch {
	case p.first.end == 0:
		p.first = s
	case len(p.others) == maxModels:
		return false
	default:
		p.others = append(p.others, s)
	}
	return true
}

func (p *places) last() (last span, ok bool) {
	if n := len(p.others); n > 0 {
		return p.others[n-1], true
	}
	return p.first, p.first.end > 0
}

func (b *Body) addModel(s span) {
	if !b.models.add(s) {
		b.Clear = false
	}
}

// NamesSeveral reports whether the body names a model more than once. Servers
// differ in which one they use.
func (b Body) NamesSeveral() bool { return len(b.models.others) > 0 }

// IsForm reports whether the body is a form.
func (b Body) IsForm() bool { return b.form != nil }

// CanAskUsage reports whether With can ask for the usage of a stream. It cannot
// if the body was cut off or has "stream_options" twice.
func (b Body) CanAskUsage() bool { return b.Whole && !b.StreamUsage && b.askUsage.text != "" }

// Changes are the changes that With makes to a body.
type Changes struct {
	// Model replaces each model that the body names. A JSON object or a form
	// that names no model gets this one as its first member or part. If it is
	// empty, nothing changes.
	Model string
	// ServiceTier replaces each service tier in a JSON object, which gets this
	// one as a member if it has none. If it is empty, nothing changes.
	ServiceTier string
	// AskUsage asks for the usage of a stream, if that is possible: see
	// [Body.CanAskUsage].
	AskUsage bool
}

// With returns the body with its changes, in pieces. Of a body that was cut
// off, only what came is known: if a model follows, both will be there.
//
// The model stays as it is if
//   - the body names this model already, and no other,
//   - it is neither object nor form,
//   - its "model" could not be read (it is a number, say, or cut off), or
//   - it is a form, and the model has a line break or the boundary in it. Written there, it could
//     end its part and begin another.
//
// The body must be the one that was parsed. If it stays as it is, it is the
// only piece. The pieces share its memory, so that a prompt of megabytes is not
// copied for each backend that is tried.
func (b Body) With(body []byte, c Changes) [][]byte {
	var few [4]splice
	all := few[:0]
	if c.AskUsage && b.CanAskUsage() {
		all = append(all, splice{b.askUsage.span, []byte(b.askUsage.text)})
	}
	all = b.withTier(all, c.ServiceTier)
	if value := b.newModel(body, c.Model); value != nil {
		all = b.models.replace(all, b.models.addAt, value)
	}
	if len(all) == 0 {
		return [][]byte{body}
	}
	slices.SortStableFunc(all, func(a, b splice) int { return a.start - b.start })
	pieces, at := make([][]byte, 0, 2*len(all)+1), 0
	for _, s := range all {
		pieces = append(pieces, piece(body, at, s.start), s.text)
		at = s.end
	}
	return append(pieces, piece(body, at, len(body)))
}

// splice is a replacement of a span, which may be empty, by a text.
type splice struct {
	span
	text []byte
}

// replace appends the splices that write the value to each of the places or, if
// there are none, at addAt.
func (p *places) replace(all []splice, addAt int, value []byte) []splice {
	if p.first.end == 0 {
		return append(all, splice{span{addAt, addAt}, value})
	}
	all = append(all, splice{p.first, value})
	for _, s := range p.others {
		all = append(all, splice{s, value})
	}
	return all
}

func (b *Body) withTier(all []splice, tier string) []splice {
	switch {
	case tier == "" || b.ServiceTier == tier && len(b.tiers.others) == 0, b.tiers.first.end == 0 && b.front == 0:
		return all
	case b.tiers.first.end == 0:
		return b.tiers.replace(all, b.front, slices.Concat([]byte(`"service_tier":`), quote(tier), []byte(",")))
	}
	return b.tiers.replace(all, 0, quote(tier))
}

// newModel returns the text to write in each place of a model, or as the first
// member or part. It returns nil if the model stays as it is.
func (b Body) newModel(body []byte, model string) []byte {
	if model == "" || b.models.first.end == 0 && b.models.before == "" || b.namesEverywhere(body, model) {
		return nil
	}
	value, ok := b.encode(model)
	if !ok {
		return nil
	}
	if b.models.first.end == 0 {
		return slices.Concat([]byte(b.models.before), value, []byte(b.models.after))
	}
	return value
}

// namesEverywhere reports whether the body names exactly this model everywhere.
func (b Body) namesEverywhere(body []byte, model string) bool {
	if !b.HasModel || b.Model != model || !b.namesAt(b.models.first, body, model) {
		return false
	}
	for _, s := range b.models.others {
		if !b.namesAt(s, body, model) {
			return false
		}
	}
	return true
}

func (b Body) namesAt(s span, body []byte, model string) bool {
	switch {
	case b.form != nil && !b.inSession:
		return string(body[s.start:s.end]) == model
	case body[s.start] != '"':
		return false
	case needsNoEscape(model):
		return string(body[s.start+1:s.end-1]) == model
	}
	return bytes.Equal(body[s.start:s.end], quote(model))
}

// encode returns the model as it is written in the body. ok is false if it
// cannot be written there: in a form, a line break or the boundary in it could
// be read as a delimiter.
func (b Body) encode(model string) (value []byte, ok bool) {
	switch {
	case b.form == nil:
		return quote(model), true
	case b.inSession:
		value = quote(model)
	default:
		value = []byte(model)
	}
	return value, !strings.ContainsAny(model, "\r\n") && !bytes.Contains(value, b.form.dashBoundary)
}

// piece returns a part of the body whose capacity is its length, so that an
// append cannot write into the body.
func piece(body []byte, start, end int) []byte {
	return body[start:end:end]
}
