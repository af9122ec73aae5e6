package observe

import (
	"io"
	"net/http"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// ReadModels has read called with the list of models in a response, once the client has got all of it.
func ReadModels(res *http.Response, read func([]openaiapi.ListedModel)) {
	res.Body = &modelList{ReadCloser: res.Body, coding: openaiapi.ContentCoding(res.Header), read: read}
}

// modelList is a body with a list of models.
type modelList struct {
	io.ReadCloser
	coding string
	text   []byte
	read   func([]openaiapi.ListedModel)
}

func (l *modelList) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	if l.read == nil {
		return n, err
	}
	l.text = append(l.text, p[:min(n, openaiapi.MaxModelList+1-len(l.text))]...) // one more byte makes the text invalid
	if err == io.EOF {
		text, whole := openaiapi.Decompress(l.text, l.coding, openaiapi.MaxModelList)
		if models, _, ok := openaiapi.ReadModels(text); whole && ok {
			l.read(models)
		}
		l.text, l.read = nil, nil
	}
	return n, err
}

// ShutDown logs that models of a backend are shut down soon, or have been.
func (l *Log) ShutDown(backend string, models []openaiapi.ListedModel) {
	for _, m := range models {
		l.Warn("model shuts down", zap.String("backend", backend), zap.String("deployment", m.ID), zap.String("shutdown_date", m.Shutdown.Format(time.DateOnly)))
	}
}
