// Package usage reads the number of tokens that a request has used from its
// reply.
//
// A [Reader] reads the bytes as they pass. It neither keeps nor changes them.
// It splits a stream into its events. It scans them for the members of a usage,
// in the spelling of each API, and for the service tier that was paid for. The
// result does not depend on how the reply was cut into pieces (FuzzReader).
//
// The balancer asks for the usage of streams whose client did not. [Hide] then
// removes the extra chunk again, so that the client gets the stream that it
// asked for (TestTheChunkOfTheUsageIsTakenOut).
package usage

// Tokens are the tokens of one reply, as OpenAI counts them.
type Tokens struct {
	// Input is the tokens of the prompt, of which Cached came from the
	// backend's cache.
	Input, Cached int64
	// Output is the tokens of the answer, of which Reasoning are not in its
	// text.
	Output, Reasoning int64

	known bool
}

// Known reports whether the reply reported its tokens.
func (t Tokens) Known() bool { return t.known }

// node is a place in a reply: an object on the way to the counts, or a count.
type node int8

const (
	nowhere node = iota

	root    // the reply, or the data of an event
	wrapper // the object that an event is about
	object  // the usage
	inputDetails
	outputDetails

	tier // the service tier, a string

	prompt     // of chat, completions and embeddings
	completion // of chat and completions
	input      // of all other APIs
	output
	cacheRead  // of Anthropic's messages
	cacheWrite // of Anthropic's messages
	cached
	reasoning
)

const firstCount, lastCount = prompt, reasoning

func (n node) isObject() bool { return n > nowhere && n < tier }

// child returns the member of that name. Names are compared as they are
// written, because no backend escapes their letters.
func (n node) child(name []byte, inEvent bool) node {
	switch n {
	case root, wrapper:
		switch string(name) {
		case "usage":
			return object
		case "service_tier":
			return tier
		case "response", "message": // in OpenAI's responses and in Anthropic's messages
			if n == root && inEvent {
				return wrapper
			}
		}
	case object:
		switch string(name) {
		case "prompt_tokens":
			return prompt
		case "completion_tokens":
			return completion
		case "input_tokens":
			return input
		case "output_tokens":
			return output
		case "cache_read_input_tokens":
			return cacheRead
		case "cache_creation_input_tokens":
			return cacheWrite
		// a realtime session has input_token_details
		case "prompt_tokens_details", "input_tokens_details", "input_token_details":
			return inputDetails
		case "completion_tokens_details", "output_tokens_details", "output_token_details":
			return outputDetails
		}
	case inputDetails:
		if string(name) == "cached_tokens" {
			return cached
		}
	case outputDetails:
		if string(name) == "reasoning_tokens" {
			return reasoning
		}
	}
	return nowhere
}

// counts are the numbers of a usage.
type counts struct {
	values [lastCount - firstCount + 1]int64
	known  uint16 // has a bit for each value
}

func (c *counts) value(n node) int64 { return c.values[n-firstCount] }

func (c *counts) has(n node) bool { return c.known>>(n-firstCount)&1 != 0 }

// hasOutput reports whether the usage counts output, as in all APIs with a
// service tier.
func (c *counts) hasOutput() bool { return c.has(completion) || c.has(output) }

func (c *counts) set(n node, count int64) {
	c.values[n-firstCount] = count
	c.known |= 1 << (n - firstCount)
}

// add replaces counts by the counts of a later usage of the same reply.
func (c *counts) add(later *counts) {
	for n := firstCount; n <= lastCount; n++ {
		if later.has(n) {
			c.set(n, later.value(n))
		}
	}
}

func (c *counts) tokens() Tokens {
	t := Tokens{Input: c.value(prompt), Cached: c.value(cached),
		Output: c.value(completion), Reasoning: c.value(reasoning)}
	if !c.has(completion) {
		t.Output = c.value(output)
	}
	if !c.has(prompt) {
		t.Input = c.value(input)
		if !c.has(cached) { // Anthropic's input tokens do not include those read from or written to its cache
			t.Cached = c.value(cacheRead)
			t.Input += c.value(cacheRead) + c.value(cacheWrite)
		}
	}
	t.known = c.has(prompt) || c.has(input) || c.has(completion) || c.has(output)
	return t
}
