package openaiapi

import (
	"bytes"
	"slices"
)

// place is what a value in a body is.
type place uint8

const (
	elsewhere place = iota // nothing in it matters

	// Objects, or lists of them, in which only some members are looked at.
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

	// Ids, lists of them, or objects that have one.
	named
	ofPart  // of a part of what a reply shows
	mention // of an object that a reply only mentions

	// Texts, or lists of them.
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
)

// isText reports whether a text at the place is an id, or encrypted content.
func (at place) isText() bool { return named <= at && at <= madeName }

// grammar defines what a member of an object is, by its name and by the place of the object.
type grammar uint8

const (
	inRequest grammar = iota
	inReply
	inRequestOfAnyCase
	inNewAPI
	inNewReply
)

// under returns the place of a member, whose name is given as it is written.
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

// isOdd reports whether a name that is not the wanted one may be that to servers that ignore the case of letters, or
// blanks, or for which brackets make a list of several fields.
func isOdd(name []byte, wanted string) bool {
	if len(name) < len(wanted) || name[0]|0x20 != wanted[0] && ' ' < name[0] && name[0] < 0x7f {
		return false // nearly all
	}
	name, _, _ = bytes.Cut(bareText(name), []byte("["))
	return bytes.EqualFold(name, []byte(wanted))
}

// place returns the place of a member. It knows where the API's requests name objects. All other members
// are passed over: ids in prompts, metadata and schemas are the user's text.
func (g grammar) place(at place, key []byte) place {
	switch g {
	case inReply:
		return placeInReply(at, key)
	case inNewAPI:
		return placeInNewAPI(key)
	case inNewReply:
		return placeInNewReply(at, key)
	case inRequestOfAnyCase:
		return inRequest.place(at, lower(key))
	}
	switch at {
	case variables:
		return inside
	case top:
		switch string(key) {
		case "model":
			return memberModel
		case "stream":
			return memberStream
		case "max_tokens":
			return memberMaxTokens
		case "max_completion_tokens":
			return memberMaxCompletion
		case "max_output_tokens":
			return memberMaxOutput
		case "n":
			return memberN
		case "stream_options":
			return memberStreamOptions
		case "service_tier":
			return memberServiceTier
		case "store":
			return memberStore
		case "background":
			return memberBackground
		case "audio":
			return memberAudio
		case "tools":
			return tool
		case "messages":
			return turn
		case "previous_response_id":
			return previous
		case "conversation":
			return named
		case "input", "items":
			return item
		case "prompt", "workflow":
			return holder
		case "session", "response": // of a WebSocket
			return top
		case "models", "fallbacks":
			return memberModels
		}
		switch {
		case isOdd(key, "model"), isOdd(key, "session"), isOdd(key, "response"):
			return memberOddModel
		case isOdd(key, "service_tier"):
			return memberOddTier
		}
	}
	switch {
	case at == item && (string(key) == "id" || string(key) == "approval_request_id"):
		return ofItem
	case (at == named || at == holder) && string(key) == "id":
		return named
	case at == holder && string(key) == "variables":
		return variables
	case at == turn && string(key) == "audio":
		return holder
	case (at == tool || at == item) && string(key) == "tools":
		return tool
	case at == memberStreamOptions && string(key) == "include_usage":
		return memberIncludeUsage
	}
	switch string(key) {
	case "file_id", "file_ids", "vector_store_id", "vector_store_ids", "container", "container_id", "input_file_id",
		"training_file", "validation_file", "assistant_id", "thread_id", "part_ids", "skill_id":
		return named
	case "encrypted_content":
		return encrypted
	case "content", "output", "tools", "tool_resources", "file_search", "code_interpreter", "vector_stores", "file",
		"image_file", "input_image_mask", "attachments", "messages", "additional_messages", "thread", "files", "image", "images",
		"mask", "input_reference", "environment", "skills", "data_source":
		return inside
	case "source", "video", "characters", "voice":
		return holder
	}
	if (at == top || at == tool) && isObjectMember(key) && string(key) != "id" && !notObjects[string(key)] {
		return guess
	}
	return elsewhere
}

// lower returns the name in lower case, as servers compare it that ignore the case.
func lower(key []byte) []byte { return bytes.ToLower(bytes.ToUpper(key)) }

// placeInReply is place for replies. These name objects that exist where the reply comes from.
func placeInReply(at place, key []byte) place {
	switch string(key) {
	case "id":
		switch at {
		case top, listed:
			return named
		case item, ofPart:
			return ofPart
		case mention:
			return mention
		}
	case "thread_id", "output_file_id", "error_file_id", "result_files":
		return ofPart
	case "conversation", "container_id":
		return mention
	case "encrypted_content":
		if at == listed {
			return mentionEncrypted
		}
		return encrypted
	case "content":
		return inside
	case "annotations":
		return annotation
	}
	switch at {
	case top:
		switch string(key) {
		case "data":
			return listed
		case "output", "item":
			return item
		case "file": // that an upload becomes
			return ofPart
		case "choices":
			return inside
		case "response":
			return top
		case "store":
			return memberStore
		}
	case inside:
		if string(key) == "message" || string(key) == "delta" {
			return turn
		}
	case turn:
		if string(key) == "audio" {
			return ofPart
		}
	case annotation:
		if string(key) == "file_id" {
			return mention
		}
	}
	return elsewhere
}
