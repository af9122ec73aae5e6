package model

import "cmp"

// Operation is the kind of a request.
type Operation int

// The operations. Those from OpChat to OpResponse have a body that names a model.
const (
	OpUnknown Operation = iota
	OpChat
	OpEmbedding
	OpTranscription
	OpResponse
	OpStoredResponse
	OpObject
	OpModels
	OpRealtime
	OpResponses // over a WebSocket
)

// Generates reports whether the operation has a body that asks for a reply.
func (op Operation) Generates() bool { return op >= OpChat && op <= OpResponse }

// Limited reports whether the operation is one of a deployment, whose limits it counts
// towards.
func (op Operation) Limited() bool { return op.Generates() || op == OpRealtime }

// AzureName returns the name of the operation in the text of Azure's 429.
func (op Operation) AzureName() string {
	names := map[Operation]string{
		OpEmbedding: "Embeddings_Create", OpTranscription: "Transcriptions_Create", OpResponse: "Responses_Create", OpRealtime: "Realtime_Connect",
	}
	return cmp.Or(names[op], "ChatCompletions_Create")
}
