// Package redis is an engine of state for openai_lb: with it, replicas share
// what they learn, by a server of Redis or Valkey, by Sentinel or by Redis
// Cluster.
//
// The balancer decides what is shared and what it means: see package state.
// This package moves the bytes. A record is a field of a hash, an entry has a
// key of its own, and a message is published on a channel that all replicas
// hear. Scripts in the server make each change atomic, and remove what has
// expired by the server's clock (TestEveryServerIsAStore,
// TestAnEntryIsFoundUntilAnotherCanTakeItsPlace).
//
// What it promises:
//
//   - No request waits for Redis, except for a lookup of an unknown id, which
//     has a deadline (TestOnlyRequestsWithUnknownIDsAskRedis,
//     TestALookupEndsInTime).
//   - Whatever becomes of Redis, requests are served
//     (TestNoFaultOfRedisReachesARequest).
//   - Memory in Redis is bounded and expires (TestNothingOutlivesItsUse,
//     TestWhatMadeUpModelsCostRedis).
//   - All pools of a process share a few connections, which reloads keep
//     (TestHandlersShareOneConnectionThroughReloads).
//   - Balancers with different prefixes or databases know nothing of each other
//     (TestPrefixesAndDatabasesKeepBalancersApart).
package redis

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	client "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	_ "github.com/openai-lb/caddy-openai-lb/redis/regions" // state regions, an engine of several Redis servers
	"github.com/openai-lb/caddy-openai-lb/state"
)

func init() {
	caddy.RegisterModule(new(Engine))
	client.SetLogger(quiet{}) // it would write a line for each failure
}

// quiet logs nothing: who uses the client gets every error.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// Engine shares the knowledge of replicas by Redis: one server, servers with
// Sentinel, or Redis Cluster. Every value may contain placeholders, which are
// resolved at load.
type Engine struct {
	// Address lists servers, sentinels or nodes of a cluster, as host:port.
	// Without Sentinel and Cluster it is one server. Required.
	Address []string `json:"address,omitempty"`

	// Sentinel is the name of the master for which the sentinels are asked.
	// Default: no Sentinel.
	Sentinel string `json:"sentinel,omitempty"`

	// SentinelUsername is a user of an ACL of the sentinels. Default: the
	// default user.
	SentinelUsername string `json:"sentinel_username,omitempty"`

	// SentinelPassword is the password of the sentinels, if they require one.
	// It is read like Password. Default: none.
	SentinelPassword string `json:"sentinel_password,omitempty"`

	// Cluster is true if the servers are a Redis Cluster. Default: false.
	Cluster bool `json:"cluster,omitempty"`

	// Username is a user of an ACL. Default: the default user.
	Username string `json:"username,omitempty"`

	// Password is the user's password. Use {env.X} or {file.X}: they are
	// resolved at load and never shown. A file is reloaded for each connection.
	// Default: none.
	Password string `json:"password,omitempty"`

	// DB is the number of the database. A cluster has only 0. Default: 0.
	DB int `json:"db,omitempty"`

	// TLS encrypts connections. The server's certificate is checked against the
	// system's certificates, or the ones in SSL_CERT_FILE. Default: false.
	TLS bool `json:"tls,omitempty"`

	// ServerName is the name in the server's certificate. Default: its host.
	ServerName string `json:"server_name,omitempty"`

	// KeyPrefix is the beginning of every key and every channel. Balancers with
	// different prefixes or databases share nothing. Default: `openai_lb:`.
	KeyPrefix string `json:"key_prefix,omitempty"`

	// resolved has no placeholders, but for those of passwords in files.
	resolved settings
}

// settings are the options without placeholders.
type settings struct {
	Address            []string
	Master             string
	Cluster            bool
	Server, Sentinel   login
	DB                 int
	TLS                bool
	ServerName, Prefix string
}

// login is a user and a password, or the placeholder of a password in a file.
type login struct {
	User, Pass, File string
	// last is the password that was last read from the file.
	last *atomic.Pointer[string]
}

// setPassword resolves the option of a password.
func (l *login) setPassword(raw string) (err error) {
	if raw == "" {
		return nil
	}
	if keys.InFile(raw) {
		l.File, l.last = raw, new(atomic.Pointer[string])
		return l.read()
	}
	l.Pass, err = keys.Resolve(raw)
	return err
}

// read reads the password in the file again. If that fails, it stays as it was.
func (l login) read() error {
	password, err := keys.Resolve(l.File)
	if err == nil {
		l.last.Store(&password)
	}
	return err
}

func (l login) hasPassword() bool { return l.Pass != "" || l.File != "" }

// password returns the password for a new connection.
func (l login) password() string {
	if l.File == "" {
		return l.Pass
	}
	_ = l.read() // Secrets shows that it fails
	return *l.last.Load()
}

// Secrets implements state.SecretReader.
func (e *Engine) Secrets() map[string]func() error {
	secrets := make(map[string]func() error)
	for option, l := range map[string]login{"password": e.resolved.Server, "sentinel_password": e.resolved.Sentinel} {
		if l.File != "" {
			secrets[option] = l.read
		}
	}
	return secrets
}

// CaddyModule returns the Caddy module information.
func (*Engine) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.openai_lb.state.redis",
		New: func() caddy.Module { return new(Engine) },
	}
}

// Provision resolves the options. It opens no connection.
func (e *Engine) Provision(caddy.Context) error {
	s := settings{Cluster: e.Cluster, DB: e.DB, TLS: e.TLS}
	repl := caddy.NewReplacer()
	for _, option := range []struct {
		name, raw string
		into      *string
	}{
		{"sentinel", e.Sentinel, &s.Master}, {"sentinel_username", e.SentinelUsername, &s.Sentinel.User}, {"username", e.Username, &s.Server.User},
		{"server_name", e.ServerName, &s.ServerName}, {"key_prefix", cmp.Or(e.KeyPrefix, "openai_lb:"), &s.Prefix},
	} {
		var err error
		if *option.into, err = repl.ReplaceOrErr(option.raw, true, true); err != nil {
			return fmt.Errorf("%s: %w", option.name, err)
		}
	}
	for _, raw := range e.Address {
		address, err := repl.ReplaceOrErr(raw, true, true)
		if err != nil {
			return fmt.Errorf("address: %w", err)
		}
		s.Address = append(s.Address, strings.Fields(address)...) // {env.X} may have several
	}
	if err := s.Server.setPassword(e.Password); err != nil {
		return fmt.Errorf("password: %w", err)
	}
	if err := s.Sentinel.setPassword(e.SentinelPassword); err != nil {
		return fmt.Errorf("sentinel_password: %w", err)
	}
	e.resolved = s
	return s.check()
}

// check returns an error if an option is wrong. It shows none that may be
// secret.
func (s *settings) check() error {
	if len(s.Address) == 0 {
		return errors.New("address requires a host:port")
	}
	for _, address := range s.Address {
		if strings.ContainsAny(address, "@/") {
			// the address is not shown, because it may contain a password
			return errors.New("address must be a host:port, without a scheme, a user or a password")
		}
		host, port, err := net.SplitHostPort(address)
		if n, portErr := strconv.ParseUint(port, 10, 16); err != nil || host == "" || portErr != nil || n == 0 {
			return fmt.Errorf("address '%s' is not a host:port, such as redis.internal:6379", address)
		}
	}
	switch {
	case s.Cluster && s.Master != "":
		return errors.New("sentinel and cluster cannot be combined")
	case !s.Cluster && s.Master == "" && len(s.Address) > 1:
		return fmt.Errorf("address names %d servers: expected one, or sentinel or cluster", len(s.Address))
	case s.Sentinel != login{} && s.Master == "":
		return errors.New("sentinel_username and sentinel_password are not used without sentinel")
	case s.Server.User != "" && !s.Server.hasPassword():
		return errors.New("username requires a password")
	case s.Sentinel.User != "" && !s.Sentinel.hasPassword():
		return errors.New("sentinel_username requires a sentinel_password")
	case s.DB < 0:
		return fmt.Errorf("db '%d' is not a whole number of 0 or more", s.DB)
	case s.Cluster && s.DB != 0:
		return fmt.Errorf("db '%d' is not available: a cluster has only 0", s.DB)
	case s.ServerName != "" && !s.TLS:
		return errors.New("server_name is not used without tls")
	case strings.ContainsAny(s.Prefix, " \t\r\n*?[]") || len(s.Prefix) > 128:
		return fmt.Errorf("key_prefix '%s' must not contain white space or any of *?[], nor be longer than 128 bytes",
			s.Prefix)
	}
	return nil
}

// Identity implements state.Engine.
func (e *Engine) Identity() string {
	text, err := json.Marshal(e.resolved)
	if err != nil {
		panic(err) // it has only strings, numbers and flags
	}
	return string(text)
}

// Limits on how long anything may take, and on how many connections there are.
const (
	dialTimeout = time.Second
	ioTimeout   = 500 * time.Millisecond
	// silence is after which time without a message a connection is lost. There
	// is one each second.
	silence = 3 * time.Second
	// connections is how many there are to a server, besides the one to listen,
	// and spare how many of them wait for use.
	connections, spare = 4, 2
)

// roots are the trusted certificates. nil: the system's.
var roots *x509.CertPool

// Open implements state.Engine.
func (e *Engine) Open() (state.Store, error) {
	s := e.resolved
	options := &client.UniversalOptions{
		Addrs: s.Address, MasterName: s.Master, IsClusterMode: s.Cluster, DB: s.DB,
		CredentialsProviderContext: func(context.Context) (string, string, error) {
			return s.Server.User, s.Server.password(), nil
		},
		Protocol:        2, // all servers know it
		DisableIdentity: true,
		// the server need not announce its maintenance
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		DialTimeout:              dialTimeout,
		ReadTimeout:              ioTimeout,
		WriteTimeout:             ioTimeout,
		PoolTimeout:              ioTimeout,
		ContextTimeoutEnabled:    true,
		DialerRetries:            1,
		MaxRetries:               1,
		PoolSize:                 connections,
		PipelinePoolSize:         -1,    // they are all for pipelines, too
		MinIdleConns:             spare, // so that a cooldown does not wait for one
		PoolFIFO:                 true,  // all are used now and then, and so none becomes too old
		ConnMaxIdleTime:          time.Minute,
	}
	if s.Cluster {
		// the client repeats commands by itself, and asks another node which
		// one has what as soon as one does not answer
		options.MaxRetries = -1
	}
	if s.Sentinel.hasPassword() {
		options.OnConnect = s.Sentinel.logIn
	}
	if s.TLS {
		options.TLSConfig = &tls.Config{ServerName: s.ServerName, RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	channel := s.Prefix + "messages"
	if s.DB != 0 {
		channel += ":" + strconv.Itoa(s.DB)
	}
	opened := &store{options: options, prefix: s.Prefix, channel: channel, id: rand.Text()}
	opened.apart.Store(s.Cluster)
	return opened, nil
}

// logIn logs in to a sentinel. go-redis has no provider of credentials for
// sentinels, but it calls this for each connection, those to the master
// included.
func (l login) logIn(ctx context.Context, c *client.Conn) error {
	if strings.HasPrefix(c.String(), "Redis<FailoverClient ") { // the master, by the name that go-redis gives it
		return nil
	}
	return c.AuthACL(ctx, cmp.Or(l.User, "default"), l.password()).Err()
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Engine)(nil)
	_ caddyfile.Unmarshaler = (*Engine)(nil)
	_ state.Engine          = (*Engine)(nil)
	_ state.SecretReader    = (*Engine)(nil)
)
