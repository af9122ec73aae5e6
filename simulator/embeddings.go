package simulator

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
)

type embeddingList struct {
	Object string         `json:"object"`
	Data   []embedding    `json:"data"`
	Model  string         `json:"model"`
	Usage  embeddingUsage `json:"usage"`
}

type embedding struct {
	Object    string `json:"object"`
	Index     int    `json:"index"`
	Embedding any    `json:"embedding"`
}

type embeddingUsage struct {
	PromptTokens int64 `json:"prompt_tokens"`
	TotalTokens  int64 `json:"total_tokens"`
}

func (x *exchange) embeddings() any {
	list := embeddingList{
		Object: "list",
		Data:   []embedding{},
		Model:  x.model(),
		Usage:  embeddingUsage{x.cost.prompt, x.cost.prompt},
	}
	for i, input := range inputs(x.request.Input) {
		vector := embed(input)
		e := embedding{Object: "embedding", Index: i, Embedding: vector}
		if x.request.EncodingFormat == "base64" {
			// The official SDKs ask for base64 and decode it.
			var buf [4 * len(vector)]byte
			for j, value := range vector {
				binary.LittleEndian.PutUint32(buf[4*j:], math.Float32bits(value))
			}
			e.Embedding = base64.StdEncoding.EncodeToString(buf[:])
		}
		list.Data = append(list.Data, e)
	}
	return list
}

// inputs splits what may be one or several. A string or a list of tokens is one;
// any other list is several.
func inputs(v any) []any {
	list, ok := v.([]any)
	if !ok {
		return []any{v}
	}
	if len(list) > 0 {
		if _, isToken := list[0].(float64); isToken {
			return []any{list}
		}
	}
	return list
}

// embed makes a vector of length 1. The same input gives the same vector.
func embed(input any) [8]float32 {
	sum := sha256.Sum256(fmt.Append(nil, input))
	var vector [8]float32
	var square float64
	for i := range vector {
		vector[i] = float32(int32(binary.BigEndian.Uint32(sum[4*i:]))) / (1 << 31)
		square += float64(vector[i]) * float64(vector[i])
	}
	for i := range vector {
		vector[i] = float32(float64(vector[i]) / math.Sqrt(square))
	}
	return vector
}
