package status

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
)

// An order to drain or resume a backend is given at one replica, and meant for
// all. After it, the command asks all replicas. It fails if one does not
// answer, or has not received the order: a script that changes the deployment
// next must not do so while another replica still uses it.

// wanted is the state of a backend that an order should cause at all replicas.
type wanted struct {
	word    string
	drained bool
}

var drained, resumed = &wanted{"drained", true}, &wanted{"resumed", false}

const (
	// pollInterval is the time between two requests while a command waits.
	pollInterval = 300 * time.Millisecond
	// hearing is how long replicas have to receive an order. A lost message is
	// repeated within a second.
	hearing = 3 * time.Second
)

// followOrder waits until all replicas have received the order and, with
// --wait, until the backend is idle. Then it prints the backend as all replicas
// see it. The error names the replicas that have not received the order.
func (c call) followOrder(command *cobra.Command, flags caddycmd.Flags, address, name string, query url.Values) error {
	idle := func(int64) bool { return true }
	if flags.Lookup("wait") != nil && flags.Bool("wait") {
		idle = waitingFor(command.ErrOrStderr())
	}
	all, missed, err := c.everywhere.follow(address, name, query, idle)
	if err != nil {
		return err
	}
	rows, err := json.Marshal(all.Rows)
	if err == nil {
		err = showing(c.show, flags)(command.OutOrStdout(), rows)
	}
	if err == nil && len(missed) > 0 {
		err = fmt.Errorf("backend '%s' is %s, but not at every replica: %s",
			cli.Printable(name), c.everywhere.word, strings.Join(missed, ", "))
	}
	return err
}

// waitingFor returns a function that reports whether no request is in flight.
// The function prints the number in flight when it changes.
func waitingFor(progress io.Writer) (idle func(inFlight int64) bool) {
	shown := int64(0)
	return func(inFlight int64) bool {
		if inFlight != 0 && inFlight != shown {
			fmt.Fprintf(progress, "requests in flight: %d\n", inFlight)
			shown = inFlight
		}
		return inFlight == 0
	}
}

// follow asks all replicas about the backends of a name until these are idle,
// and in the wanted state everywhere. After a while, it no longer waits for
// replicas that do not answer or have not received the order, and returns their
// names as missed.
func (w *wanted) follow(address, name string, query url.Values,
	idle func(inFlight int64) bool) (all admin.All[Backend], missed []string, err error) {
	everyone := url.Values{"replica": {admin.EveryReplica}}
	if query.Has("pool") {
		everyone.Set("pool", query.Get("pool"))
	}
	for until := time.Now().Add(hearing); ; time.Sleep(pollInterval) {
		answer, err := admin.Ask(address, http.MethodGet, backendsPath, everyone)
		if err != nil {
			return all, nil, err
		}
		all = admin.All[Backend]{} // or else its maps would keep what was true before
		if err := admin.Decode(answer, &all); err != nil {
			return all, nil, err
		}
		all.Rows = slices.DeleteFunc(all.Rows, func(b Backend) bool { return b.Name != name })
		inFlight := int64(0)
		for _, b := range all.Rows {
			if at, known := b.DrainedAt[all.AskedID()]; known && at != w.drained {
				return all, nil, fmt.Errorf("backend '%s' of pool '%s' is no longer %s",
					cli.Printable(b.Name), cli.Printable(b.Pool), w.word)
			}
			inFlight += b.InFlight
		}
		if len(all.Rows) == 0 {
			return all, nil, errors.New("the backend is gone: the configuration has changed")
		}
		missed = w.missed(all)
		if idle(inFlight) && (len(missed) == 0 || !time.Now().Before(until)) {
			return all, missed, nil
		}
	}
}

// missed returns the names of replicas that have not answered, or have not
// received the order.
func (w *wanted) missed(all admin.All[Backend]) (missed []string) {
	for _, s := range all.Replicas {
		name := s.Name()
		switch {
		case !s.Included:
			name += " (no answer, last heard " + cli.UTC(s.Heard) + ")"
		case slices.ContainsFunc(all.Rows,
			func(b Backend) bool { at, known := b.DrainedAt[s.ID]; return known && at != w.drained }):
			name += " (it has not heard of it)"
		default:
			continue
		}
		missed = append(missed, name)
	}
	if missed == nil && !all.Connected {
		return []string{"the one that was asked is not connected to others"}
	}
	return missed
}
