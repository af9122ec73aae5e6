package e2e

import (
	"context"
	"io"
	"net/http"
	"strings"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/responses"
)

// The calls of goClient about what is stored, as client.mjs and client.py make
// them.

// wait lets what is in the middle of a call happen: a restart of the balancer.
func (c goClient) wait(ctx context.Context) error {
	if c.pause == "" {
		return nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.pause, nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err == nil {
		res.Body.Close()
	}
	return err
}

func (c goClient) jsonl(ctx context.Context, purpose openai.FilePurpose) (*openai.FileObject, error) {
	return c.Files.New(ctx, openai.FileNewParams{File: openai.File(strings.NewReader("{}\n"), "input.jsonl", "application/json"), Purpose: purpose})
}

func (c goClient) content(ctx context.Context, file string) (string, error) {
	res, err := c.Files.Content(ctx, file)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return string(text), err
}

func (c goClient) conversation(ctx context.Context, _ option.RequestOption) (got outcome, err error) {
	question := c.response()
	for turn := range 10 {
		if turn == 5 {
			if err := c.wait(ctx); err != nil {
				return got, err
			}
		}
		var id string
		if turn%2 == 1 {
			stream := c.Responses.NewStreaming(ctx, question)
			for stream.Next() {
				if event := stream.Current(); event.Type == "response.completed" {
					id = event.Response.ID
				}
			}
			if err := stream.Err(); err != nil {
				return got, err
			}
		} else {
			response, err := c.Responses.New(ctx, question)
			if err != nil {
				return got, err
			}
			id = response.ID
		}
		question.PreviousResponseID = openai.String(id)
		got.Deltas++
	}
	return got, nil
}

func (c goClient) storedResponse(ctx context.Context, _ option.RequestOption) (got outcome, err error) {
	question := c.response()
	question.Background = openai.Bool(true)
	response, err := c.Responses.New(ctx, question)
	if err != nil {
		return got, err
	}
	if err = c.wait(ctx); err != nil {
		return got, err
	}
	read, err := c.Responses.Get(ctx, response.ID, responses.ResponseGetParams{})
	if err != nil {
		return got, err
	}
	items, err := c.Responses.InputItems.List(ctx, response.ID, responses.InputItemListParams{})
	if err != nil {
		return got, err
	}
	cancelled, err := c.Responses.Cancel(ctx, response.ID)
	if err != nil {
		return got, err
	}
	return outcome{Text: read.OutputText(), Finish: string(cancelled.Status), Dimensions: len(items.Data)}, c.Responses.Delete(ctx, response.ID)
}

func (c goClient) resumedStream(ctx context.Context, _ option.RequestOption) (got outcome, err error) {
	question := c.response()
	question.Background = openai.Bool(true)
	stream := c.Responses.NewStreaming(ctx, question)
	var id string
	var last int64
	for got.Deltas < 2 && stream.Next() {
		event := stream.Current()
		if event.Type == "response.created" {
			id = event.Response.ID
		}
		if event.Type == "response.output_text.delta" {
			got.Text += event.Delta
		}
		if last = event.SequenceNumber; got.Text != "" {
			got.Deltas++
		}
	}
	stream.Close()
	if err = stream.Err(); err != nil {
		return got, err
	}
	if err = c.wait(ctx); err != nil {
		return got, err
	}
	// the SDK puts "stream" into the body, where a GET has none
	stream = c.Responses.GetStreaming(ctx, id, responses.ResponseGetParams{StartingAfter: param.NewOpt(last)}, option.WithQuery("stream", "true"))
	defer stream.Close()
	for stream.Next() {
		switch event := stream.Current(); event.Type {
		case "response.output_text.delta":
			got.Text += event.Delta
		case "response.completed":
			got.Finish = string(event.Response.Status)
		}
	}
	return got, stream.Err()
}

func (c goClient) file(ctx context.Context, _ option.RequestOption) (got outcome, err error) {
	file, err := c.jsonl(ctx, openai.FilePurposeUserData)
	if err != nil {
		return got, err
	}
	if err = c.wait(ctx); err != nil {
		return got, err
	}
	question := c.response()
	question.Input = responses.ResponseNewParamsInputUnion{OfInputItemList: responses.ResponseInputParam{
		responses.ResponseInputItemParamOfMessage(responses.ResponseInputMessageContentListParam{
			{OfInputFile: &responses.ResponseInputFileParam{FileID: openai.String(file.ID)}},
		}, responses.EasyInputMessageRoleUser),
	}}
	response, err := c.Responses.New(ctx, question)
	if err != nil {
		return got, err
	}
	text, err := c.content(ctx, file.ID)
	if err != nil {
		return got, err
	}
	_, err = c.Files.Delete(ctx, file.ID)
	return outcome{Text: text, Finish: string(response.Status)}, err
}

func (c goClient) batch(ctx context.Context, _ option.RequestOption) (got outcome, err error) {
	file, err := c.jsonl(ctx, openai.FilePurposeBatch)
	if err != nil {
		return got, err
	}
	job, err := c.Batches.New(ctx, openai.BatchNewParams{InputFileID: file.ID, Endpoint: "/v1/responses", CompletionWindow: "24h"})
	if err != nil {
		return got, err
	}
	if err = c.wait(ctx); err != nil {
		return got, err
	}
	if job, err = c.Batches.Get(ctx, job.ID); err != nil {
		return got, err
	}
	text, err := c.content(ctx, job.OutputFileID)
	return outcome{Text: text, Finish: string(job.Status)}, err
}

func (c goClient) vectorStore(ctx context.Context, _ option.RequestOption) (got outcome, err error) {
	file, err := c.jsonl(ctx, openai.FilePurposeAssistants)
	if err != nil {
		return got, err
	}
	store, err := c.VectorStores.New(ctx, openai.VectorStoreNewParams{Name: openai.String("docs"), FileIDs: []string{file.ID}})
	if err != nil {
		return got, err
	}
	if err = c.wait(ctx); err != nil {
		return got, err
	}
	added, err := c.VectorStores.Files.New(ctx, store.ID, openai.VectorStoreFileNewParams{FileID: file.ID})
	if err != nil {
		return got, err
	}
	question := c.response()
	question.Tools = []responses.ToolUnionParam{responses.ToolParamOfFileSearch([]string{store.ID})}
	response, err := c.Responses.New(ctx, question)
	if err != nil {
		return got, err
	}
	_, err = c.VectorStores.Delete(ctx, store.ID)
	return outcome{Text: response.OutputText(), Finish: string(added.Status)}, err
}
