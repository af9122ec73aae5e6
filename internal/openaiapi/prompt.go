package openaiapi

import "github.com/cespare/xxhash/v2"

// Prompt identifies the beginning that the prompts of one session share.
// Providers cache it: a backend need not process the beginning of a prompt
// again if an earlier request to it began in the same way. A Prompt contains
// hashes and no part of the body.
//
// The beginning is the part that stays the same from turn to turn: the
// instructions, the tools, and the messages up to the user's first message.
// Later messages change with each turn, and without the user's first message
// all sessions of an application would begin alike. A prompt of completions may
// grow from turn to turn, so only as much of it counts as a cache needs. Bytes
// are compared as they are sent, except that the order of the body's members
// does not matter.
type Prompt struct {
	cacheKey, conversation        uint64
	instructions, tools, messages uint64
	// begins reports whether messages includes a message of the user.
	begins bool
	// continues reports whether the prompt continues after a stored response.
	continues bool
}

// shortestPrompt is the length of the shortest body whose prompt may be cached:
// providers cache no prompts of fewer than 1024 tokens.
const shortestPrompt = 1024 * charsPerToken

// Key returns a number that is the same for all requests of a session. It comes
// from the prompt_cache_key if there is one, else from the conversation, else
// from the beginning of the prompt. It is 0 if there is none of these, because
// the body is too short for a cache or does not contain the beginning.
func (p *Prompt) Key(bodyLength int64) uint64 {
	switch {
	case p.cacheKey != 0:
		return p.cacheKey
	case p.conversation != 0:
		return p.conversation
	case p.begins && !p.continues && bodyLength >= shortestPrompt:
		return join(join(p.instructions, p.tools), p.messages)
	}
	return 0
}

func (p *Prompt) set(name, value []byte) {
	switch string(name) {
	case "prompt_cache_key":
		p.cacheKey = hashText(value)
	case "conversation":
		if p.conversation = hashText(value); value[0] == '{' {
			p.conversation = hash(value)
		}
	case "previous_response_id":
		p.continues = hashText(value) != 0
	case "instructions", "system":
		p.instructions = hash(value)
	case "tools":
		p.tools = hash(value)
	case "prompt": // of completions; that of a response is an object
		if len(value) > len(`""`) && (value[0] == '"' || value[0] == '[') {
			p.messages, p.begins = hash(value[:min(len(value), shortestPrompt)]), true
		}
	case "messages", "input":
		if value[0] != '[' {
			p.messages = hashText(value)
			p.begins = p.messages != 0
		}
	}
}

// begin starts a member of the body. It returns p if the member is a list of
// messages, else nil.
func (p *Prompt) begin(name []byte) *Prompt {
	if string(name) != "messages" && string(name) != "input" {
		return nil
	}
	p.messages, p.begins = 0, false
	return p
}

// addMessage records one of the messages up to the user's first message. Later
// messages are ignored. A text instead of a list counts as that message.
func (p *Prompt) addMessage(role, content []byte) {
	if p.begins {
		return
	}
	switch string(role) {
	case `"user"`:
		p.begins = len(content) > 0
		fallthrough
	case `"system"`, `"developer"`:
		p.messages = join(p.messages, hash(content))
	}
}

// hashText returns the hash of a string. It returns 0 if the value is not a
// string, or is empty.
func hashText(value []byte) uint64 {
	if len(value) <= len(`""`) || value[0] != '"' {
		return 0
	}
	return hash(value)
}

// longestHashed is how much of a value is hashed. It is far more than providers
// use to find their caches, and saves reading a picture of ten megabytes once
// more.
const longestHashed = 64 << 10

// hash returns a hash of the value that is never 0. Long values are
// distinguished by their beginnings and lengths.
func hash(value []byte) uint64 {
	if len(value) <= longestHashed {
		return max(1, xxhash.Sum64(value))
	}
	return join(xxhash.Sum64(value[:longestHashed]), uint64(len(value)))
}

// join combines two hashes. Their order matters.
func join(a, b uint64) uint64 {
	const odd = 0x9e3779b97f4a7c15 // the golden ratio, as in many hashes
	a = (a ^ a>>29) * odd
	b = (a + b ^ (a+b)>>32) * odd
	return max(1, b^b>>29)
}
