package redis

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	client "github.com/redis/go-redis/v9"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// store keeps each group of records in a hash of its own, so that a script has
// to do with one key only, wherever a cluster has it. Redis forgets keys by its
// own clock, but not the fields of a hash, so the scripts do that. An entry has
// a key of its own: '+' if it is firm, else '-', and its value.
type store struct {
	options *client.UniversalOptions
	once    sync.Once
	opened  client.UniversalClient

	prefix string
	// channel is where messages go. It has the number of the database in its
	// name, because databases do not keep channels apart.
	channel string
	// id identifies the store that has claimed a name.
	id string
	// apart reports whether no command can have keys of several slots.
	apart atomic.Bool
}

// groupsAtOnce is how many groups one command loads, unless they are on
// different nodes.
const groupsAtOnce = 100

// The scripts are sent in full: the server recognizes them by their text, so a
// server that has restarted or become the master needs no setup.
var (
	//go:embed put.lua
	putScript string
	//go:embed load.lua
	loadScript string
	// It keeps the value ARGV[1] as KEYS[1] for ARGV[2] milliseconds. If a firm
	// one is there, or any and the new one is not firm, only its time begins
	// anew. It has no comment in it, because it is sent with every entry.
	//go:embed keep.lua
	keepScript string
	// It claims KEYS[1] for ARGV[1] for ARGV[2] milliseconds, unless it is
	// claimed, and returns who has claimed it. No key ends while a script runs.
	// Between two commands the claim of another replica could end, and no one
	// would have it.
	//go:embed claim.lua
	claimScript string
)

var modes = map[state.Mode]string{state.Extend: "extend", state.Finish: "finish", state.Replace: "replace",
	state.Latest: "latest"}

// client opens the client at its first use, because it connects at once.
func (s *store) client() client.UniversalClient {
	s.once.Do(func() { s.opened = client.NewUniversalClient(s.options) })
	return s.opened
}

// reload makes the client of a cluster ask again which node has what, if err
// says that a use has failed. By itself it asks once a minute, and until then
// it calls a node that is gone.
func (s *store) reload(ctx context.Context, err error) {
	if cluster, ok := s.client().(*client.ClusterClient); ok && err != nil {
		cluster.ReloadState(ctx)
	}
}

// execute returns the commands of a pipeline, and the first error. Each command
// that failed has its error, also if the server did not let the connection in:
// go-redis sets it on none of them.
func (s *store) execute(ctx context.Context, pipe client.Pipeliner) ([]client.Cmder, error) {
	done, err := pipe.Exec(ctx)
	s.reload(ctx, err)
	if !slices.ContainsFunc(done, func(c client.Cmder) bool { return c.Err() != nil }) {
		for _, command := range done {
			command.SetErr(err)
		}
	}
	return done, err
}

func (s *store) key(group string) string { return s.prefix + "group:" + group }
func (s *store) entry(key string) string { return s.prefix + "id:" + key }

// Put implements state.Store.
func (s *store) Put(ctx context.Context, records []state.Record) error {
	pipe := s.client().Pipeline()
	for _, r := range records {
		channel := s.channel
		if r.News != nil && len(r.News) == 0 {
			channel = "" // nothing is sent
		}
		pipe.Eval(ctx, putScript, []string{s.key(r.Group)}, channel, r.Message, modes[r.Mode], r.Key, r.Version,
			r.TTL.Milliseconds(), cmp.Or(r.Most, state.MaxRecords), r.Near.Milliseconds(),
			state.MaxTTL.Milliseconds(), r.News)
	}
	done, err := s.execute(ctx, pipe)
	for _, command := range done {
		if command.Err() != nil && strings.HasPrefix(command.Err().Error(), "FULL ") {
			return state.ErrFull
		}
	}
	return err
}

// Load implements state.Store.
func (s *store) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	if !s.apart.Load() {
		kept, now, err := s.load(ctx, groups, groupsAtOnce)
		if !client.HasErrorPrefix(err, "CROSSSLOT") {
			return kept, now, err
		}
		s.apart.Store(true) // it is a cluster behind one address
	}
	return s.load(ctx, groups, 1)
}

func (s *store) load(ctx context.Context, groups []string, atOnce int) (kept []state.Kept, now time.Time, err error) {
	pipe := s.client().Pipeline()
	var replies []*client.Cmd
	for some := range slices.Chunk(groups, atOnce) {
		keys := make([]string, len(some))
		for i, group := range some {
			keys[i] = s.key(group)
		}
		replies = append(replies, pipe.Eval(ctx, loadScript, keys, state.MaxTTL.Milliseconds(), maxField,
			state.MaxRecords))
	}
	if _, err := s.execute(ctx, pipe); err != nil {
		return nil, now, err
	}
	for i, reply := range replies {
		lists, err := reply.Slice()
		some := groups[i*atOnce : min((i+1)*atOnce, len(groups))]
		if err != nil {
			return nil, now, err
		}
		if len(lists) != len(some)+1 {
			return nil, now, fmt.Errorf("there are %d groups, want %d", len(lists)-1, len(some))
		}
		if text, _ := lists[len(some)].(string); i == 0 {
			micros, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				return nil, now, err
			}
			now = time.UnixMicro(micros)
		}
		for j, list := range lists[:len(some)] {
			kept = appendKept(kept, some[j], list)
		}
	}
	return kept, now, nil
}

// maxField is the most bytes that a field may have: a message and its prefix.
const maxField = state.MaxMessage + 100

// appendKept reads what is kept of a group.
func appendKept(kept []state.Kept, group string, list any) []state.Kept {
	values, _ := list.([]any)
	for len(values) >= 4 {
		key, _ := values[0].(string)
		ttl, _ := values[1].(string)
		version, _ := values[2].(string)
		message, _ := values[3].(string)
		if left, err := strconv.ParseInt(ttl, 10, 64); err == nil {
			kept = append(kept, state.Kept{Group: group, Key: key, Version: version,
				TTL: time.Duration(left) * time.Millisecond, Message: []byte(message)})
		}
		values = values[4:]
	}
	return kept
}

// Keep implements state.Store.
func (s *store) Keep(ctx context.Context, entries []state.Entry) (failed []int, err error) {
	pipe := s.client().Pipeline()
	for _, e := range entries {
		mark := "-"
		if e.Firm {
			mark = "+"
		}
		pipe.Eval(ctx, keepScript, []string{s.entry(e.Key)}, mark+string(e.Value), e.TTL.Milliseconds())
	}
	done, err := s.execute(ctx, pipe)
	for i, command := range done {
		if command.Err() != nil {
			failed = append(failed, i)
		}
	}
	return failed, err
}

// maxEntry is the most bytes that are kept of an entry: its mark and its value.
const maxEntry = 1 + state.MaxValue

// Find implements state.Store.
func (s *store) Find(ctx context.Context, keys []string) ([]state.Entry, error) {
	pipe := s.client().Pipeline()
	values, ttls := make([]*client.StringCmd, len(keys)), make([]*client.DurationCmd, len(keys))
	for i, key := range keys {
		values[i], ttls[i] = pipe.GetRange(ctx, s.entry(key), 0, maxEntry), pipe.PTTL(ctx, s.entry(key))
	}
	_, _ = s.execute(ctx, pipe) // every command has its error
	entries := make([]state.Entry, len(keys))
	for i, key := range keys {
		entries[i].Key = key
		value, err := values[i].Result()
		if err = cmp.Or(err, ttls[i].Err()); err != nil && !client.HasErrorPrefix(err, "WRONGTYPE") {
			return nil, err
		}
		// negative: it is gone, or stays for ever
		if left := ttls[i].Val(); value != "" && len(value) <= maxEntry && left >= 0 {
			entries[i].Firm, entries[i].Value, entries[i].TTL = value[0] == '+', []byte(value[1:]),
				max(left, time.Millisecond)
		}
	}
	return entries, nil
}

// Claim implements state.Store.
func (s *store) Claim(ctx context.Context, claims []state.Claim) (won []bool, err error) {
	pipe := s.client().Pipeline()
	owners := make([]*client.Cmd, len(claims))
	for i, c := range claims {
		owners[i] = pipe.Eval(ctx, claimScript, []string{s.prefix + "claim:" + c.Name}, s.id, c.TTL.Milliseconds())
	}
	_, _ = s.execute(ctx, pipe) // every command has its error
	for _, owner := range owners {
		text, err := owner.Text()
		strange := client.HasErrorPrefix(err, "WRONGTYPE") // no replica's claim
		if err != nil && !strange {
			return nil, err
		}
		won = append(won, strange || text == s.id)
	}
	return won, nil
}

// Listen implements state.Store.
func (s *store) Listen(ctx context.Context, ready func(), hear func([]byte)) (err error) {
	defer func() { s.reload(ctx, err) }()
	messages := s.client().Subscribe(ctx)
	defer messages.Close()
	// a read does not end with its context
	defer context.AfterFunc(ctx, func() { messages.Close() })()
	if err := messages.Subscribe(ctx, s.channel); err != nil {
		return err
	}
	for {
		received, err := messages.ReceiveTimeout(ctx, silence)
		if err != nil {
			return err
		}
		switch m := received.(type) {
		case *client.Subscription:
			ready()
		case *client.Message:
			if len(m.Payload) <= state.MaxMessage {
				hear([]byte(m.Payload))
			}
		}
	}
}

// Close implements state.Store.
func (s *store) Close() error {
	s.once.Do(func() {}) // from now on there is none to open
	if s.opened == nil {
		return nil
	}
	return s.opened.Close()
}
