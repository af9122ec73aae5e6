package openaiapi

import (
	"bytes"
	"maps"
	"slices"
)

// place is the meaning of a value in a body, which determines how its members
// are read.
type place uint8

const (
	elsewhere place = iota // nothing in it matters

	// Objects, or lists of objects, of which only some members are read.
	top        // the body, or what is like one
	inside     // an object whose members may name objects
	turn       // a message of a chat
	item       // an object that has an id itself
	listed     // an item of a list, which may be older than the request
	holder     // an object whose id is that of another object
	variables  // an object whose members may all name objects
	annotation // the model's note on where its text comes from
	tool       // what a request lets the model use
	open       // an object of an API that is not known
	oneBelow   // an object below the top of a reply of such an API, but no list

	// Ids, lists of ids, or objects that have an id.
	named
	ofPart  // of a part of what a reply shows
	mention // of an object that a reply only mentions

	// Texts, or lists of texts.
	previous
	ofItem
	encrypted
	mentionEncrypted
	guess    // may be an id, or something else
	madeName // the name of an object that a new API has made, which may be like no id

	// Other members of a body that are read.
	memberModel
	memberModels   // to fall back to
	memberOddModel // which only some servers take for the model: see isOddModel
	memberStream
	memberMaxTokens
	memberMaxCompletion
	memberMaxOutput
	memberN
	memberStreamOptions
	memberIncludeUsage // of the stream options
	memberServiceTier
	memberOddTier
	memberStore
	memberBackground
	memberAudio // in which a voice may have an id

	placeCount // how many there are
)

// isText reports whether a text at the place is an id, or encrypted content.
func (at place) isText() bool { return named <= at && at <= madeName }

// grammar defines the place of a member, by the member's name and the place of
// its object.
type grammar uint8

const (
	inRequest grammar = iota
	inReply
	inRequestOfAnyCase
	inNewAPI
	inNewReply
)

// under returns the place of a member whose name is given as it is written,
// with escapes.
func (g grammar) under(at place, quoted []byte) place {
	if g == inRequestOfAnyCase {
		return g.place(at, decodeName(quoted))
	}
	found := g.place(at, quoted)
	if found != elsewhere || len(quoted) < len(`\u0000`) || bytes.IndexByte(quoted, '\\') < 0 {
		return found
	}
	return g.place(at, decodeName(quoted))
}

func decodeName(quoted []byte) []byte {
	return unquoteBytes(slices.Concat([]byte{'"'}, quoted, []byte{'"'}))
}

// isOdd reports whether some servers may read another name as the wanted one.
// Some ignore case or blanks, and for some, brackets make a list of several
// fields.
func isOdd(name []byte, wanted string) bool {
	if len(name) < len(wanted) || name[0]|0x20 != wanted[0] && ' ' < name[0] && name[0] < 0x7f {
		return false // nearly all
	}
	name, _, _ = bytes.Cut(bareText(name), []byte("["))
	return bytes.EqualFold(name, []byte(wanted))
}

// place returns the place of a member. It lists the members in which the API's
// requests name objects. All other members are ignored: ids in prompts,
// metadata and schemas are the user's text.
func (g grammar) place(at place, key []byte) place {
	switch g {
	case inReply:
		return replyMembers[at][string(key)]
	case inNewAPI:
		return placeInNewAPI(key)
	case inNewReply:
		return placeInNewReply(at, key)
	case inRequestOfAnyCase:
		key = lower(key)
	}
	if at == variables {
		return inside
	}
	if found := requestMembers[at][string(key)]; found != elsewhere {
		return found
	}
	if at == top {
		switch {
		case isOdd(key, "model"), isOdd(key, "session"), isOdd(key, "response"):
			return memberOddModel
		case isOdd(key, "service_tier"):
			return memberOddTier
		}
	}
	if (at == top || at == tool) && isObjectMember(key) && string(key) != "id" && !notObjects[string(key)] {
		return guess
	}
	return elsewhere
}

// members maps the names of an object's members to their places. All other
// members are elsewhere.
type members map[string]place

// requestMembers are the members of each place in a request.
var requestMembers = tableOf(members{
	"file_id": named, "file_ids": named, "input_file_id": named, "training_file": named, "validation_file": named,
	"vector_store_id": named, "vector_store_ids": named, "container": named, "container_id": named,
	"assistant_id": named, "thread_id": named, "part_ids": named, "skill_id": named,

	"encrypted_content": encrypted,

	"content": inside, "output": inside, "tools": inside, "tool_resources": inside, "file_search": inside,
	"code_interpreter": inside, "vector_stores": inside, "file": inside, "files": inside, "image_file": inside,
	"input_image_mask": inside, "attachments": inside, "messages": inside, "additional_messages": inside, "thread": inside,
	"image": inside, "images": inside, "mask": inside, "input_reference": inside, "environment": inside, "skills": inside,
	"data_source": inside,

	"source": holder, "video": holder, "characters": holder, "voice": holder,
}, map[place]members{
	top: {
		"model": memberModel, "models": memberModels, "fallbacks": memberModels,
		"stream": memberStream, "stream_options": memberStreamOptions,
		"max_tokens": memberMaxTokens, "max_completion_tokens": memberMaxCompletion, "max_output_tokens": memberMaxOutput,
		"n": memberN, "service_tier": memberServiceTier, "store": memberStore, "background": memberBackground,
		"audio": memberAudio, "tools": tool, "messages": turn, "previous_response_id": previous, "conversation": named,
		"input": item, "items": item, "prompt": holder, "workflow": holder,
		"session": top, "response": top, // of a WebSocket
	},
	item:                {"id": ofItem, "approval_request_id": ofItem, "tools": tool},
	named:               {"id": named},
	holder:              {"id": named, "variables": variables},
	turn:                {"audio": holder},
	tool:                {"tools": tool},
	memberStreamOptions: {"include_usage": memberIncludeUsage},
})

// replyMembers are the members of each place in a reply. The objects that a
// reply names exist in the account that sent it.
var replyMembers = tableOf(members{
	"thread_id": ofPart, "output_file_id": ofPart, "error_file_id": ofPart, "result_files": ofPart,
	"conversation": mention, "container_id": mention,
	"encrypted_content": encrypted, "content": inside, "annotations": annotation,
}, map[place]members{
	top: {
		"id": named, "data": listed, "output": item, "item": item, "choices": inside, "response": top, "store": memberStore,
		"file": ofPart, // that an upload becomes
	},
	listed:     {"id": named, "encrypted_content": mentionEncrypted},
	item:       {"id": ofPart},
	ofPart:     {"id": ofPart},
	mention:    {"id": mention},
	inside:     {"message": turn, "delta": turn},
	turn:       {"audio": ofPart},
	annotation: {"file_id": mention},
})

// tableOf returns the members of each place: those that may be anywhere,
// overridden by those of the place.
func tableOf(anywhere members, at map[place]members) (table [placeCount]members) {
	for i := range table {
		table[i] = maps.Clone(anywhere)
		maps.Copy(table[i], at[place(i)])
	}
	return table
}

// lower returns the name in lower case, as servers that ignore case compare it.
func lower(key []byte) []byte { return bytes.ToLower(bytes.ToUpper(key)) }
