package attempt

import (
	"cmp"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
)

// Options configures attempts: how much of a request is kept for further ones,
// and how long a backend may take.
type Options struct {
	// RequestBuffers is how much of a body is kept in memory for retries.
	// Default: 32MiB.
	//
	//	request_buffers <size>
	RequestBuffers int64 `json:"request_buffers,omitempty"`

	// ResponseHeaderTimeout is how long a backend may take to begin a reply
	// that is not streamed. Default: 5m, and 10m if no other backend can
	// follow.
	//
	//	response_header_timeout <duration>
	ResponseHeaderTimeout caddy.Duration `json:"response_header_timeout,omitempty"`

	// StreamFirstEventTimeout is how long a backend may take until the first
	// byte of a stream's body. Default: 5m, and 10m if no other backend can
	// follow.
	//
	//	stream_first_event_timeout <duration>
	StreamFirstEventTimeout caddy.Duration `json:"stream_first_event_timeout,omitempty"`

	// StreamIdleTimeout is how long a reply may pause between two reads.
	// Default: 5m.
	//
	//	stream_idle_timeout <duration>
	StreamIdleTimeout caddy.Duration `json:"stream_idle_timeout,omitempty"`

	// lastReply and lastStream replace ResponseHeaderTimeout and
	// StreamFirstEventTimeout for an attempt that no other attempt can follow.
	lastReply, lastStream time.Duration
}

const (
	defaultRequestBuffers = 32 << 20

	// The public figures behind these defaults: the slowest hundredth of a
	// million streams took 94 s until its first token, and a healthy response
	// paused for 195 s.
	defaultFirstByte     = 5 * time.Minute
	defaultLastFirstByte = 10 * time.Minute
	defaultPause         = 5 * time.Minute
)

// Provision checks the options and sets their defaults.
func (o *Options) Provision() error {
	o.lastReply = cmp.Or(time.Duration(o.ResponseHeaderTimeout), defaultLastFirstByte)
	o.lastStream = cmp.Or(time.Duration(o.StreamFirstEventTimeout), defaultLastFirstByte)
	for _, d := range []struct {
		name     string
		value    *caddy.Duration
		fallback time.Duration
	}{
		{"response_header_timeout", &o.ResponseHeaderTimeout, defaultFirstByte},
		{"stream_first_event_timeout", &o.StreamFirstEventTimeout, defaultFirstByte},
		{"stream_idle_timeout", &o.StreamIdleTimeout, defaultPause},
	} {
		if err := directive.DefaultDuration(d.name, d.value, d.fallback); err != nil {
			return err
		}
	}
	if o.RequestBuffers < 0 || o.RequestBuffers > directive.MaxInt {
		return fmt.Errorf("request_buffers '%d' is not a number of bytes from 1 to %d",
			o.RequestBuffers, directive.MaxInt)
	}
	o.RequestBuffers = cmp.Or(o.RequestBuffers, defaultRequestBuffers)
	return nil
}

// firstByte returns how long a backend may take until the first byte of a
// reply.
func (o *Options) firstByte(isStream, isLast bool) time.Duration {
	switch {
	case isStream && isLast:
		return o.lastStream
	case isStream:
		return time.Duration(o.StreamFirstEventTimeout)
	case isLast:
		return o.lastReply
	}
	return time.Duration(o.ResponseHeaderTimeout)
}

// Directives are the options in a Caddyfile.
func (o *Options) Directives() directive.Options {
	return directive.Options{
		"request_buffers":            directive.Size(&o.RequestBuffers),
		"response_header_timeout":    directive.Duration(&o.ResponseHeaderTimeout),
		"stream_first_event_timeout": directive.Duration(&o.StreamFirstEventTimeout),
		"stream_idle_timeout":        directive.Duration(&o.StreamIdleTimeout),
	}.Check(func() error {
		checked := *o
		return checked.Provision()
	})
}

// WebSocketOptions configures for how long WebSockets stay open.
type WebSocketOptions struct {
	// StreamCloseDelay is how long open WebSockets stay once a reload has
	// replaced their config. Default: they are closed at once.
	//
	//	stream_close_delay <duration>
	StreamCloseDelay caddy.Duration `json:"stream_close_delay,omitempty"`

	// StreamTimeout is how long a WebSocket may be open. Default: no limit.
	//
	//	stream_timeout <duration>
	StreamTimeout caddy.Duration `json:"stream_timeout,omitempty"`
}

// Check returns an error if an option is not valid.
func (o *WebSocketOptions) Check() error {
	if o.StreamCloseDelay < 0 {
		return fmt.Errorf("stream_close_delay '%s' is not a duration above 0", time.Duration(o.StreamCloseDelay))
	}
	if o.StreamTimeout < 0 {
		return fmt.Errorf("stream_timeout '%s' is not a duration above 0", time.Duration(o.StreamTimeout))
	}
	return nil
}

// Directives are the options in a Caddyfile.
func (o *WebSocketOptions) Directives() directive.Options {
	return directive.Options{
		"stream_close_delay": directive.Duration(&o.StreamCloseDelay),
		"stream_timeout":     directive.Duration(&o.StreamTimeout),
	}
}
