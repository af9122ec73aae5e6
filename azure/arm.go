package azure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// armVersion is the api-version of all requests to Azure Resource Manager.
	armVersion = "api-version=2025-06-01"
	// maxPage is how much of a page is read. One of 1,000 deployments has about
	// a megabyte.
	maxPage = 32 << 20
	// maxPages is how many pages a list may have.
	maxPages = 1000
	// A request that fails, or that ARM throttles, is sent armTries times, and
	// after failures with twice as long a pause each time.
	armTries      = 6
	firstARMPause = time.Second
	// armTimeout ends a request.
	armTimeout = 30 * time.Second
)

// arm reads from Azure Resource Manager. It sends its token to no other host.
type arm struct {
	endpoint *url.URL
	client   *http.Client
	token    string
	// until is when the command gives up.
	until time.Time
}

// newARM returns a reader that sends requests by the transport.
func newARM(endpoint *url.URL, transport http.RoundTripper, token string, until time.Time) *arm {
	return &arm{endpoint: endpoint, token: token, until: until, client: &http.Client{
		Transport: transport, Timeout: armTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// list reads all pages of a list. The path is escaped.
func list[T any](ctx context.Context, a *arm, path string) (all []T, err error) {
	next := a.endpoint.Scheme + "://" + a.endpoint.Host + path + "?" + armVersion
	for range maxPages {
		var page struct {
			Value    []T
			NextLink string
		}
		body, err := a.get(ctx, next)
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(body, &page); err != nil {
			return nil, fmt.Errorf("%s: the reply is not a list: %w", path, err)
		}
		if all = append(all, page.Value...); page.NextLink == "" {
			return all, nil
		}
		if next, err = a.link(page.NextLink); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil, fmt.Errorf("%s has more than %d pages", path, maxPages)
}

// link checks the link to a next page. It may name ARM's port, which the
// endpoint leaves out.
func (a *arm) link(text string) (string, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return "", errors.New("nextLink is not a URL")
	case u.Scheme != a.endpoint.Scheme || u.User != nil ||
		!strings.EqualFold(strings.TrimSuffix(u.Host, ":443"), strings.TrimSuffix(a.endpoint.Host, ":443")):
		return "", fmt.Errorf("nextLink leads to another host: expected %s", a.endpoint.Host)
	}
	return u.String(), nil
}

// get sends a request until it is answered, or until it cannot be in time.
func (a *arm) get(ctx context.Context, link string) ([]byte, error) {
	pause := firstARMPause
	for try := 1; ; try++ {
		body, wait, err := a.try(ctx, link)
		if err == nil || wait < 0 || ctx.Err() != nil {
			return body, err
		}
		if try == armTries {
			return nil, fmt.Errorf("%w, %d times", err, armTries)
		}
		if wait == 0 {
			wait, pause = pause, 2*pause
		}
		if left := time.Until(a.until); wait >= left {
			return nil, fmt.Errorf("%w, and to wait for %s would take longer than --timeout allows",
				err, wait.Round(time.Second))
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
}

// try sends a request. wait is how long to wait after an error: 0 if ARM did
// not say, and negative if a further request would fail, too.
func (a *arm) try(ctx context.Context, link string) (body []byte, wait time.Duration, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, link, http.NoBody)
	if err != nil {
		return nil, -1, errors.New("the path is not valid")
	}
	r.Header.Set("Authorization", "Bearer "+a.token)
	r.Header.Set("Accept", "application/json")
	r.Header.Set("User-Agent", "caddy-openai-lb")
	res, err := a.client.Do(r)
	if err != nil {
		return nil, 0, fmt.Errorf("%s: %w", r.URL.Host, withoutURL(err))
	}
	defer res.Body.Close()
	if body, err = io.ReadAll(io.LimitReader(res.Body, maxPage+1)); err != nil {
		return nil, 0, fmt.Errorf("%s: the reply was cut: %w", r.URL.Path, withoutURL(err))
	}
	switch {
	case res.StatusCode == http.StatusOK && len(body) > maxPage:
		return nil, -1, fmt.Errorf("%s: the reply has more than %d bytes", r.URL.Path, maxPage)
	case res.StatusCode == http.StatusOK:
		return body, 0, nil
	case res.StatusCode == http.StatusTooManyRequests, res.StatusCode >= http.StatusInternalServerError:
		wait, _ = verdict.ReadHint(res.StatusCode, res.Header, nil, time.Now())
		wait = max(wait, 0)
	default:
		wait = -1
	}
	return nil, wait, fmt.Errorf("%s: %s", r.URL.Path, a.describe(res.StatusCode, body))
}

// describe returns the description of an error of ARM's: its status, its code
// and its message.
func (a *arm) describe(status int, body []byte) string {
	text := fmt.Sprint(status)
	if name := http.StatusText(status); name != "" {
		text += " " + name
	}
	var reply struct {
		Error struct{ Code, Message string }
	}
	if json.Unmarshal(body, &reply) == nil {
		for _, words := range []string{reply.Error.Code, reply.Error.Message} {
			if words = strings.Join(strings.Fields(strings.ReplaceAll(words, a.token, "…")), " "); words != "" {
				text += ", " + words
			}
		}
	}
	return printable(cut(opaque.ReplaceAllString(text, "…")))
}

// withoutURL leaves out the request of an error, of which the caller shows what
// matters.
func withoutURL(err error) error {
	if failed, ok := errors.AsType[*url.Error](err); ok {
		return failed.Err
	}
	return err
}
