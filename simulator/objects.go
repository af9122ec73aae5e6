package simulator

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"slices"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// object is something stored, other than a response: a file, a batch, a vector
// store, a conversation, or what belongs to one of these.
type object map[string]any

// collection is a kind of objects: how they and their ids are called, and the
// words for one that is not there.
type collection struct {
	kind, prefix, missing string
}

var collections = map[string]collection{
	"files":         {"file", "file-", "No such File object: %s"},
	"batches":       {"batch", "batch_", "No batch found with id '%s'."},
	"vector_stores": {"vector_store", "vs_", "Vector store with id '%s' not found."},
	"conversations": {"conversation", "conv_", "Conversation with id '%s' not found."},
	// within others
	"vector_stores/files": {"vector_store.file", "file-", "No file found with id '%s'."},
	"conversations/items": {"message", "msg_", "Item with id '%s' not found."},
}

// notHere is the reply about an object that is not stored here.
func (c collection) notHere(id string) *wire.Reply {
	return notFound(fmt.Sprintf(c.missing, id))
}

// objectPath is a path to objects taken apart.
type objectPath struct {
	name   string // of the collection
	id     string
	within string // the name of a collection of the object's, or a verb
	item   string // the id of an object in that
}

// parseObjectPath takes apart what follows /v1/, if it is about objects.
func parseObjectPath(rest string) (p objectPath, ok bool) {
	segments := strings.SplitN(strings.TrimSuffix(rest, "/"), "/", 4)
	for i, field := range []*string{&p.name, &p.id, &p.within, &p.item} {
		if i < len(segments) {
			*field = segments[i]
		}
	}
	_, ok = collections[p.name]
	return p, ok
}

// object answers requests about objects.
func (x *exchange) object() *wire.Reply {
	p, method := x.route.object, x.r.Method
	c := collections[p.name]
	if p.id == "" {
		switch method {
		case http.MethodPost:
			return x.createObject(p.name, c)
		case http.MethodGet:
			return x.list(c.kind, "")
		}
		return x.notFound()
	}
	body := x.h.state.stored(p.id)
	var o object
	if body == nil || json.Unmarshal(body, &o) != nil || o["object"] != c.kind {
		return c.notHere(p.id)
	}
	switch within, nested := collections[p.name+"/"+p.within]; {
	case p.within == "" && method == http.MethodGet, p.within == "" && method == http.MethodPost:
		return wire.JSON(http.StatusOK, o)
	case p.within == "" && method == http.MethodDelete:
		x.h.state.forget(p.id)
		return wire.JSON(http.StatusOK, object{"id": p.id, "object": c.kind + ".deleted", "deleted": true})
	case p.name == "files" && p.within == "content" && method == http.MethodGet:
		return &wire.Reply{Status: http.StatusOK, ContentType: "application/octet-stream", Body: x.h.state.stored("content of " + p.id)}
	case p.name == "batches" && p.within == "cancel" && method == http.MethodPost:
		o["status"] = "cancelled"
		return x.keep(p.id, o)
	case nested:
		return x.nestedObject(p, within)
	}
	return x.notFound()
}

// nestedObject answers requests about what belongs to an object.
func (x *exchange) nestedObject(p objectPath, c collection) *wire.Reply {
	switch method := x.r.Method; {
	case p.item == "" && method == http.MethodGet:
		return x.list(c.kind, p.id)
	case p.item == "" && method == http.MethodPost && p.within == "files":
		id, _ := x.body.fields["file_id"].(string)
		if x.h.state.stored(id) == nil {
			return collections["files"].notHere(id)
		}
		return x.keep(p.id+" "+id, object{"id": id, "object": c.kind, "created_at": x.h.now().Unix(), "usage_bytes": 1,
			"status": "completed", "vector_store_id": p.id, "last_error": nil})
	case p.item == "" && method == http.MethodPost:
		x.addItems(p.id)
		return x.list(c.kind, p.id)
	}
	key := p.item
	if p.within == "files" {
		key = p.id + " " + p.item
	}
	switch body := x.h.state.stored(key); {
	case body == nil:
		return c.notHere(p.item)
	case x.r.Method == http.MethodDelete:
		x.h.state.forget(key)
		return wire.JSON(http.StatusOK, object{"id": p.item, "object": c.kind + ".deleted", "deleted": true})
	default:
		return stored(body)
	}
}

// createObject makes an object, if everything that the request names is here.
func (x *exchange) createObject(name string, c collection) *wire.Reply {
	if missing := x.missing(x.body.fields); missing != nil {
		return missing
	}
	id := c.prefix + rand.Text()
	o := object{"id": id, "object": c.kind, "created_at": x.h.now().Unix(), "metadata": object{}}
	switch name {
	case "files":
		filename, purpose, content := x.upload()
		o["bytes"], o["filename"], o["purpose"], o["status"] = len(content), filename, purpose, "processed"
		x.h.state.store("content of "+id, content)
	case "batches":
		input, _ := x.body.fields["input_file_id"].(string)
		output := collections["files"].prefix + rand.Text()
		x.keep(output, object{"id": output, "object": "file", "created_at": x.h.now().Unix(), "bytes": 3, "filename": "output.jsonl",
			"purpose": "batch_output", "status": "processed"})
		x.h.state.store("content of "+output, []byte("{}\n"))
		o["input_file_id"], o["output_file_id"], o["endpoint"] = input, output, x.body.fields["endpoint"]
		o["completion_window"], o["status"] = "24h", "completed"
	case "vector_stores":
		o["name"], o["status"], o["usage_bytes"], o["last_active_at"] = x.body.fields["name"], "completed", 0, x.h.now().Unix()
		o["file_counts"] = object{"in_progress": 0, "completed": 0, "failed": 0, "cancelled": 0, "total": 0}
	case "conversations":
		x.addItems(id)
	}
	return x.keep(id, o)
}

// keep stores an object and replies with it.
func (x *exchange) keep(id string, o object) *wire.Reply {
	rep := wire.JSON(http.StatusOK, o)
	x.h.state.store(id, rep.Body)
	return rep
}

// addItems stores the items of a conversation.
func (x *exchange) addItems(conversation string) {
	items, _ := x.body.fields["items"].([]any)
	for _, value := range items {
		if item, ok := value.(map[string]any); ok {
			id := model.NewMessageID()
			x.keep(id, object{"id": id, "object": "message", "type": "message", "status": "completed", "role": item["role"],
				"content": []any{}, "conversation": conversation})
		}
	}
}

// list replies with the objects of a kind, the newest first: all that are here,
// or those of one object.
func (x *exchange) list(kind, of string) *wire.Reply {
	list := []object{}
	for _, body := range x.h.state.all() {
		var o object
		if json.Unmarshal(body, &o) == nil && o["object"] == kind && (of == "" || o["vector_store_id"] == of || o["conversation"] == of) {
			list = append(list, o)
		}
	}
	slices.Reverse(list)
	var first, last any
	if len(list) > 0 {
		first, last = list[0]["id"], list[len(list)-1]["id"]
	}
	return wire.JSON(http.StatusOK, object{"object": "list", "data": list, "first_id": first, "last_id": last, "has_more": false})
}

// upload reads the form that brings a file.
func (x *exchange) upload() (filename, purpose string, content []byte) {
	_, params, err := mime.ParseMediaType(x.r.Header.Get("Content-Type"))
	if err != nil {
		return "", "", nil
	}
	for form := multipart.NewReader(bytes.NewReader(x.body.kept), params["boundary"]); ; {
		part, err := form.NextPart()
		if err != nil {
			return filename, purpose, content
		}
		switch value, _ := io.ReadAll(part); part.FormName() {
		case "file":
			filename, content = part.FileName(), value
		case "purpose":
			purpose = string(value)
		}
	}
}

// missing is the reply to a request that names what is not stored here. What a
// prompt says is no name.
func (x *exchange) missing(fields map[string]any) *wire.Reply {
	if id, _ := fields["conversation"].(string); id != "" && x.h.state.stored(id) == nil {
		return collections["conversations"].notHere(id)
	}
	for _, name := range []string{"input_file_id", "file_ids", "input", "messages", "tools", "tool_resources"} {
		if rep := x.missingIn(name, fields[name]); rep != nil {
			return rep
		}
	}
	return nil
}

// missingIn looks for names in a value that is called so.
func (x *exchange) missingIn(name string, value any) *wire.Reply {
	switch v := value.(type) {
	case []any:
		for _, element := range v {
			if rep := x.missingIn(name, element); rep != nil {
				return rep
			}
		}
	case map[string]any:
		if rep := x.missingItem(v); rep != nil {
			return rep
		}
		for name, value := range v {
			if rep := x.missingIn(name, value); rep != nil {
				return rep
			}
		}
	case string:
		switch {
		case (name == "file_id" || name == "file_ids" || name == "input_file_id") && x.h.state.stored(v) == nil:
			return collections["files"].notHere(v)
		case name == "vector_store_ids" && x.h.state.stored(v) == nil:
			return collections["vector_stores"].notHere(v)
		case name == "encrypted_content" && x.h.state.stored(v) == nil:
			return wire.OpenAIError(http.StatusBadRequest, "invalid_request_error", new("invalid_encrypted_content"),
				"The encrypted content "+v[:min(len(v), 5)]+"... could not be verified. Reason: Encrypted content could not be decrypted or parsed.")
		}
	}
	return nil
}

// missingItem checks an input item. Only a reference, and reasoning that does not
// come with its content, is looked up.
func (x *exchange) missingItem(item map[string]any) *wire.Reply {
	id, _ := item["id"].(string)
	lookedUp := item["type"] == "item_reference" || item["type"] == "reasoning" && item["encrypted_content"] == nil
	if !lookedUp || id == "" || x.h.state.stored(id) != nil {
		return nil
	}
	return notFound("Item with id '" + id + "' not found. Items are not persisted when " +
		"`store` is set to false. Try again with `store` set to true, or remove this item from your input.")
}
