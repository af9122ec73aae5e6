package openaiapi

import "github.com/cespare/xxhash/v2"

// Prompt is what requests of one session have in common, as far as providers cache prompts: the
// model reads the beginning of a prompt only once if another request that began in the same way
// came to the same place before. It holds hashes and no part of the body.
//
// The beginning is what stays from turn to turn: the instructions, the tools, and the messages up
// to the first one of the user's. Later messages change with each turn, and without that first one
// all sessions of an application would begin alike. Bytes are compared as they are sent, except
// that the order of the body's members does not matter.
type Prompt struct {
	cacheKey, conversation        uint64
	instructions, tools, messages uint64
	// begins tells that messages has one of the user's.
	begins bool
	// continues tells that the prompt goes on where a stored response ended.
	continues bool
}

// shortestPrompt is how many bytes a body has at least whose prompt may be cached: providers cache
// nothing of less than 1024 tokens.
const shortestPrompt = 1024 * charsPerToken

// ParsePrompt is ParseJSON, and takes the prompt in on the way, unless p is nil.
func ParsePrompt(body []byte, p *Prompt) Request { return parseJSON(body, p) }

// Key is the same for requests of one session. It is the prompt_cache_key if there is one, else the
// conversation, else the beginning of the prompt. That is 0, which is no key, if the body is too
// short for a cache, or does not have the beginning.
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

// take takes in a member of the body.
func (p *Prompt) take(name, value []byte) {
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
	case "messages", "input":
		p.takeMessages(value)
	}
}

// takeMessages goes over a list of messages to the first one of the user's, and no further. A text
// in place of the list is that message.
func (p *Prompt) takeMessages(b []byte) {
	p.messages, p.begins = 0, false
	if b[0] != '[' {
		p.messages = hashText(b)
		p.begins = p.messages != 0
		return
	}
	for i := 0; i < len(b) && b[i] != ']' && !p.begins; {
		var role, content []byte
		i = eachMember(b, skipSpace(b, i+1), func(name, value []byte) {
			switch string(name) {
			case "role":
				role = value
			case "content":
				content = value
			}
		})
		if i < 0 {
			return
		}
		switch string(role) {
		case `"user"`:
			p.begins = len(content) > 0
			fallthrough
		case `"system"`, `"developer"`:
			p.messages = join(p.messages, hash(content))
		}
		i = skipSpace(b, i)
	}
}

// eachMember calls f for the members of the object at b[i]. It returns the end of the object, or -1
// if it has none.
func eachMember(b []byte, i int, f func(name, value []byte)) (end int) {
	if i >= len(b) || b[i] != '{' {
		return -1
	}
	for {
		key := skipSpace(b, i+1) // past the brace or the comma
		if key < len(b) && b[key] == '}' {
			return key + 1
		}
		if key >= len(b) || b[key] != '"' {
			return -1
		}
		keyEnd := skipString(b, key)
		if keyEnd < 0 {
			return -1
		}
		colon := skipSpace(b, keyEnd)
		if colon >= len(b) || b[colon] != ':' {
			return -1
		}
		value := skipSpace(b, colon+1)
		if end = skipValue(b, value); end < 0 {
			return -1
		}
		f(b[key+1:keyEnd-1], b[value:end])
		if i = skipSpace(b, end); i >= len(b) || b[i] != ',' && b[i] != '}' {
			return -1
		}
		if b[i] == '}' {
			return i + 1
		}
	}
}

// hashText is 0 if the value is not a string, or an empty one.
func hashText(value []byte) uint64 {
	if len(value) <= len(`""`) || value[0] != '"' {
		return 0
	}
	return hash(value)
}

func hash(value []byte) uint64 { return max(1, xxhash.Sum64(value)) }

// join makes one hash of two. Their order matters.
func join(a, b uint64) uint64 {
	const odd = 0x9e3779b97f4a7c15 // the golden ratio, as in many hashes
	a = (a ^ a>>29) * odd
	b = (a + b ^ (a+b)>>32) * odd
	return max(1, b^b>>29)
}
