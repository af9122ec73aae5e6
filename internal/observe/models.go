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
	l := &modelList{ReadCloser: res.Body, read: read}
	if name := openaiapi.ContentCoding(res.Header); name != "" {
		if l.decoder = openaiapi.NewDecoder(name, l.add); l.decoder == nil {
			return
		}
	}
	res.Body = l
}

// modelList is a body with a list of models.
type modelList struct {
	io.ReadCloser
	decoder *openaiapi.Decoder
	text    []byte
	read    func([]openaiapi.ListedModel)
}

func (l *modelList) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	if l.decoder != nil {
		l.decoder.Write(p[:n])
	} else {
		l.add(p[:n])
	}
	if err == io.EOF && l.read != nil {
		l.end()
		if models, _, ok := openaiapi.ReadModels(l.text); ok {
			l.read(models)
		}
		l.text, l.read = nil, nil
	}
	return n, err
}

func (l *modelList) add(p []byte) {
	if l.read != nil && len(l.text) <= openaiapi.MaxModelList { // one more byte makes the text invalid
		l.text = append(l.text, p[:min(len(p), openaiapi.MaxModelList+1-len(l.text))]...)
	}
}

// Close ends the decoding, also of a list that the client did not get.
func (l *modelList) Close() error {
	l.end()
	return l.ReadCloser.Close()
}

func (l *modelList) end() {
	if l.decoder != nil {
		l.decoder.Close()
	}
}

// ShutDown logs that models of a backend are shut down soon, or have been.
func (l *Log) ShutDown(backend string, models []openaiapi.ListedModel) {
	for _, m := range models {
		l.Warn("model shuts down", zap.String("backend", backend), zap.String("deployment", m.ID), zap.String("shutdown_date", m.Shutdown.Format(time.DateOnly)))
	}
}
