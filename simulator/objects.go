package simulator

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// object is JSON: what a request says, or something stored, other than a
// response: a file, a batch, a vector store, a conversation, or what belongs to
// one of these.
type object = map[string]any

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
}

// filesOfStore are the files of a vector store.
var filesOfStore = collection{"vector_store.file", "file-", "No file found with id '%s'."}

// notHere is the reply about an object that is not stored here.
func (c collection) notHere(id string) *wire.Reply {
	return wire.Invalid(http.StatusNotFound, fmt.Sprintf(c.missing, id))
}

// objectPath is a path to an object taken apart.
type objectPath struct {
	name string // of the collection
	id   string
	part string // what of the object is asked for, or a verb
	item string // the id of an object in that
}

// parseObjectPath takes apart what follows /v1/.
func parseObjectPath(rest string) objectPath {
	segments := append(strings.SplitN(strings.TrimSuffix(rest, "/"), "/", 4), "", "", "")
	return objectPath{segments[0], segments[1], segments[2], segments[3]}
}

// object answers requests about objects.
func (x *exchange) object() *wire.Reply {
	p, method := x.route.object, x.r.Method
	c := collections[p.name]
	switch {
	case p.id == "" && method == http.MethodPost:
		return x.createObject(p.name, c)
	case p.id == "":
		return x.notFound()
	}
	var o object
	if json.Unmarshal(x.h.state.stored(p.id), &o) != nil || o["object"] != c.kind {
		return c.notHere(p.id)
	}
	if p.name == "vector_stores" && p.part == "files" {
		return x.fileOfStore(p.id, p.item)
	}
	switch p.name + " " + method + " " + p.part {
	case p.name + " GET ":
		return wire.JSON(http.StatusOK, o)
	case p.name + " DELETE ":
		return x.remove(p.id, p.id, c.kind+".deleted")
	case "files GET content":
		return &wire.Reply{Status: http.StatusOK, ContentType: "application/octet-stream",
			Body: x.h.state.stored("content of " + p.id)}
	}
	return x.notFound()
}

// fileOfStore answers requests about the files of a vector store.
func (x *exchange) fileOfStore(store, file string) *wire.Reply {
	if file == "" && x.r.Method == http.MethodPost {
		return x.addFile(store)
	}
	key := store + " " + file // a file can be in several stores
	switch body := x.h.state.stored(key); {
	case body == nil:
		return filesOfStore.notHere(file)
	case x.r.Method == http.MethodDelete:
		return x.remove(key, file, filesOfStore.kind+".deleted")
	default:
		return stored(body)
	}
}

// createObject makes an object, if everything that the request names is here.
func (x *exchange) createObject(name string, c collection) *wire.Reply {
	if missing := x.missing(); missing != nil {
		return missing
	}
	id, now := c.prefix+rand.Text(), x.h.now().Unix()
	o := object{"id": id, "object": c.kind, "created_at": now, "metadata": object{}}
	switch name {
	case "files":
		filename, purpose, content := x.upload()
		o["bytes"], o["filename"], o["purpose"], o["status"] = len(content), filename, purpose, "processed"
		x.h.state.store("content of "+id, content)
	case "batches":
		output := collections["files"].prefix + rand.Text()
		x.keep(output, object{"id": output, "object": "file", "created_at": now, "bytes": 3, "filename": "output.jsonl",
			"purpose": "batch_output", "status": "processed"})
		x.h.state.store("content of "+output, []byte("{}\n"))
		o["input_file_id"], o["output_file_id"], o["endpoint"] = x.body.fields["input_file_id"], output, x.body.fields["endpoint"]
		o["completion_window"], o["status"] = "24h", "completed"
	case "vector_stores":
		o["name"], o["status"], o["usage_bytes"], o["last_active_at"] = x.body.fields["name"], "completed", 0, now
		o["file_counts"] = object{"in_progress": 0, "completed": 0, "failed": 0, "cancelled": 0, "total": 0}
	}
	return x.keep(id, o)
}

// keep stores an object and replies with it.
func (x *exchange) keep(id string, o object) *wire.Reply {
	rep := wire.JSON(http.StatusOK, o)
	x.h.state.store(id, rep.Body)
	return rep
}

// remove forgets what is stored under a key, and replies so.
func (x *exchange) remove(key, id, kind string) *wire.Reply {
	x.h.state.forget(key)
	return wire.JSON(http.StatusOK, object{"id": id, "object": kind, "deleted": true})
}

// stored is a reply with JSON such as that of a stored object.
func stored(body []byte) *wire.Reply {
	return &wire.Reply{Status: http.StatusOK, ContentType: wire.JSONType, Body: body}
}

// addFile adds a file to a vector store.
func (x *exchange) addFile(store string) *wire.Reply {
	id, _ := x.body.fields["file_id"].(string)
	if x.h.state.stored(id) == nil {
		return collections["files"].notHere(id)
	}
	return x.keep(store+" "+id, object{"id": id, "object": filesOfStore.kind, "created_at": x.h.now().Unix(),
		"usage_bytes": 1,
		"status":      "completed", "vector_store_id": store, "last_error": nil})
}

// upload reads the form that brings a file.
func (x *exchange) upload() (filename, purpose string, content []byte) {
	x.r.Body = io.NopCloser(bytes.NewReader(x.body.bytes))
	file, header, err := x.r.FormFile("file")
	if err != nil {
		return "", "", nil
	}
	defer func() { _ = x.r.MultipartForm.RemoveAll() }()
	content, _ = io.ReadAll(file)
	return header.Filename, x.r.FormValue("purpose"), content
}

// missing is the reply to a request that names what is not stored here. Names
// in the text of a prompt do not count.
func (x *exchange) missing() *wire.Reply {
	fields := x.body.fields
	if previous := x.request.PreviousResponseID; previous != "" && x.h.state.stored(previous) == nil {
		return wire.OpenAIError(http.StatusBadRequest, "invalid_request_error", "previous_response_not_found",
			fmt.Sprintf("Previous response with id '%s' not found.", previous))
	}
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
	case object:
		if id, _ := v["id"].(string); v["type"] == "item_reference" && x.h.state.stored(id) == nil {
			return wire.Invalid(http.StatusNotFound, fmt.Sprintf("Item with id '%s' not found. Items are not persisted when `store` is set to false. "+
				"Try again with `store` set to true, or remove this item from your input.", id))
		}
		for name, value := range v {
			if rep := x.missingIn(name, value); rep != nil {
				return rep
			}
		}
	case string:
		if x.h.state.stored(v) != nil {
			return nil
		}
		switch name {
		case "file_id", "file_ids", "input_file_id":
			return collections["files"].notHere(v)
		case "vector_store_ids":
			return collections["vector_stores"].notHere(v)
		}
	}
	return nil
}
