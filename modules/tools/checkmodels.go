package tools

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// listModels asks for the list of models. A gateway with Azure's classic paths
// may have no others.
func (o *backendCheck) listModels(ctx context.Context) backendReply {
	a := o.ask(ctx, http.MethodGet, openaiapi.Route{Dialect: openaiapi.OpenAI, Operation: "/models"}, "", nil)
	if a.status == http.StatusNotFound && o.HasClassicPaths() {
		return o.ask(ctx, http.MethodGet, openaiapi.Route{Dialect: openaiapi.AzureClassic, Operation: "/models"},
			classicVersion, nil)
	}
	return a
}

// readList reads the list of models. It reports whether there is more to find
// out.
func (o *backendCheck) readList(a backendReply) (more bool) {
	class, more := o.judge(a)
	if !more {
		return false
	}
	if class == verdict.NotPermitted { // a key for inference alone
		o.accepted()
		return true
	}
	if a.status != http.StatusOK {
		o.problem(CheckWarning, "there is no list of models at %s: %s", a.request.URL.Path, refusalText(a))
		return true
	}
	models, goesOn, ok := openaiapi.ReadModels(a.body)
	if !ok {
		o.problem(CheckWarning, "the reply from %s is not a list of models: is this the API?", a.request.URL.Path)
		return true
	}
	switch {
	case o.Checked.Credential != unknown:
	case !o.isPublic(a):
		o.accepted()
	case !o.spend:
		o.problem(CheckWarning, "the list of models needs no credential, so it does not prove that the credential is accepted: use --spend")
	}
	n := len(models)
	if o.Checked.Listed = &n; o.Azure {
		return true // Azure lists the models that could be deployed, and no deployment
	}
	for i := range o.Checked.Models {
		m := &o.Checked.Models[i]
		switch {
		case slices.ContainsFunc(models,
			func(listed openaiapi.ListedModel) bool { return isListed(m.Name, listed.ID) }):
			m.State = found
		case !goesOn:
			m.State = missing
		}
	}
	o.readShutdowns(models, time.Now())
	return true
}

// readShutdowns records the models that are shut down soon, or have been: those
// that the options name, or all if they name none. A line has the models of a
// date.
func (o *backendCheck) readShutdowns(models []openaiapi.ListedModel, now time.Time) {
	ending := make(map[time.Time][]string)
	for _, m := range models {
		named := len(o.Checked.Models) == 0 ||
			slices.ContainsFunc(o.Checked.Models, func(c CheckedModel) bool { return isListed(c.Name, m.ID) })
		if named && m.EndsSoon(now) {
			ending[m.Shutdown] = append(ending[m.Shutdown], m.ID)
		}
	}
	for _, date := range slices.SortedFunc(maps.Keys(ending), time.Time.Compare) {
		text := "the provider shuts down %s on %s"
		if date.Before(now) {
			text = "the provider has shut down %s on %s"
		}
		o.problem(CheckWarning, text, strings.Join(ending[date], ", "), date.Format(time.DateOnly))
	}
}

// isPublic reports whether the reply to a request is the same without the
// credential.
func (o *backendCheck) isPublic(a backendReply) bool {
	o.slots <- struct{}{}
	defer func() { <-o.slots }()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(a.request.Context()), o.timeout)
	defer cancel()
	r := a.request.Clone(ctx)
	maps.DeleteFunc(r.Header, func(_ string, values []string) bool { return a.secrets.In(strings.Join(values, " ")) })
	if len(r.Header) == len(a.request.Header) { // a key too short to be told from other text
		return false
	}
	res, err := o.transport.RoundTrip(r)
	if err != nil {
		return false
	}
	res.Body.Close()
	return res.StatusCode == a.status
}

// isListed reports whether a model has this id in a list. Ollama adds the tag
// that it uses for a name without one, and Gemini what the model belongs to.
func isListed(name, id string) bool {
	return id == name || id == name+":latest" || id == "models/"+name
}

// askModels asks for each model that the options name. Without spend, the
// request has no messages: the backend refuses it at no cost, and says whether
// it has no such deployment.
func (o *backendCheck) askModels(ctx context.Context) {
	answers := make([]backendReply, len(o.Checked.Models))
	var wait sync.WaitGroup
	for i, m := range o.Checked.Models {
		wait.Go(func() { answers[i] = o.askModel(ctx, m.Name) })
	}
	wait.Wait()
	for i, a := range answers {
		o.readModel(&o.Checked.Models[i], a)
	}
}

// maxCompletionTokens is the field that limits the output of a chat.
const maxCompletionTokens = "max_completion_tokens"

// askModel asks a model for one token. A model that does not chat may embed.
func (o *backendCheck) askModel(ctx context.Context, name string) backendReply {
	body := map[string]any{"model": name}
	if o.spend {
		body["messages"] = []map[string]string{{"role": "user", "content": "Hi"}}
		body[maxCompletionTokens] = 1
	}
	a := o.infer(ctx, "/chat/completions", name, body)
	// some servers know only the older name
	if o.spend && refusesRequest(a) && bytes.Contains(a.body, []byte(maxCompletionTokens)) {
		delete(body, maxCompletionTokens)
		body["max_tokens"] = 1
		a = o.infer(ctx, "/chat/completions", name, body)
	}
	if o.spend && (refusesRequest(a) || a.status == http.StatusNotFound) && a.class() != verdict.NoModel {
		if b := o.infer(ctx, "/embeddings", name,
			map[string]any{"model": name, "input": "Hi"}); b.status == http.StatusOK {
			return b
		}
	}
	return a
}

// refusesRequest reports whether a backend says that it cannot do what the
// request asks for.
func refusesRequest(a backendReply) bool {
	return a.status == http.StatusBadRequest || a.status == http.StatusUnprocessableEntity
}

// isInference reports whether an answer is that of a chat or an embedding, or
// says that one token is too few.
func isInference(a backendReply) bool {
	var reply struct{ Choices, Data []json.RawMessage }
	return a.status == http.StatusOK && json.Unmarshal(a.body, &reply) == nil &&
		(reply.Choices != nil || reply.Data != nil) ||
		bytes.Contains(a.body, []byte("max_tokens or model output limit"))
}

// infer sends a request to a model: by the v1 API, or by Azure's classic path
// if there is nothing.
func (o *backendCheck) infer(ctx context.Context, operation, name string, body map[string]any) backendReply {
	text, err := json.Marshal(body)
	if err != nil {
		return backendReply{err: err}
	}
	a := o.ask(ctx, http.MethodPost, openaiapi.Route{Dialect: openaiapi.OpenAI, Operation: operation}, "", text)
	if a.status == http.StatusNotFound && o.HasClassicPaths() && a.class() != verdict.NoModel {
		route := openaiapi.Route{Dialect: openaiapi.AzureClassic, Deployment: openaiapi.EscapeSegment(name),
			Operation: operation}
		return o.ask(ctx, http.MethodPost, route, classicVersion, text)
	}
	return a
}

// readModel records what a model answered.
func (o *backendCheck) readModel(m *CheckedModel, a backendReply) {
	if a.err != nil {
		o.problem(CheckFailed, "model %s: no reply: %s", m.Name, verdict.CauseOf(a.err))
		return
	}
	o.readRemaining(a.header)
	class := a.class()
	switch {
	case class == verdict.NoModel:
		m.State = missing
	case class == verdict.Credential, class == verdict.Quota:
		o.judge(a)
	case class == verdict.NotPermitted:
		m.State = refused
		o.problem(CheckFailed, "the credential does not permit requests to model %s: %s", m.Name, refusalText(a))
	case class == verdict.Throttled:
		o.problem(CheckWarning, "model %s is throttled now: %s", m.Name, refusalText(a))
	// it may only be careless about requests that are not valid
	case !o.spend && a.status >= http.StatusInternalServerError:
		o.problem(CheckWarning, "model %s fails at a request without messages: %s", m.Name, refusalText(a))
	case !o.spend: // it was not a valid request
	case isInference(a):
		m.State = served
		o.accepted()
	case refusesRequest(a), a.status == http.StatusNotFound && m.State == found:
		m.State = refused
		o.problem(CheckWarning, "model %s answers, but serves neither chat nor embeddings: %s", m.Name, refusalText(a))
	case class == verdict.Served:
		m.State = refused
		o.problem(CheckFailed, "model %s is not served: the reply is neither a chat nor an embedding: %s",
			m.Name, refusalText(a))
	default:
		m.State = refused
		o.problem(CheckFailed, "model %s is not served: %s, %s", m.Name, class, refusalText(a))
	}
}

// judgeModels records the models that are missing.
func (o *backendCheck) judgeModels() {
	var names []string
	for _, m := range o.Checked.Models {
		if m.State == missing {
			names = append(names, m.Name)
		}
	}
	if len(names) > 0 {
		o.problem(CheckFailed, "the backend does not have %s", strings.Join(names, ", "))
	}
}
