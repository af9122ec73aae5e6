package attempt

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

func TestWhichRepliesStartACooldownAndForHowLong(t *testing.T) {
	var options PassiveHealth
	if err := options.Provision(); err != nil {
		t.Fatal(err)
	}
	const second = time.Second
	failure := Cooldown{Wait: 10 * second, OncePerRequest: true}
	wrong := Cooldown{Wait: time.Minute, OncePerRequest: true}
	chat, files := openaiapi.Inference, openaiapi.Once
	for name, c := range map[string]struct {
		reply *Reply
		kind  openaiapi.Kind
		busy  bool
		want  Cooldown // without a Wait: none
	}{
		"a throttle lasts as long as it says":        {reply: &Reply{Class: verdict.Throttled, Wait: 7 * second, Source: verdict.RetryAfter}, want: Cooldown{Wait: 7 * second}},
		"but not for less than 50 ms":                {reply: &Reply{Class: verdict.Throttled, Wait: 43 * time.Microsecond, Source: verdict.RetryAfter}, want: Cooldown{Wait: 50 * time.Millisecond}},
		"and not for more than retry_after_max":      {reply: &Reply{Class: verdict.Throttled, Wait: time.Hour, Source: verdict.RetryAfter}, want: Cooldown{Wait: 5 * time.Minute}},
		"a throttle that says 0 may become longer":   {reply: &Reply{Class: verdict.Throttled, Source: verdict.RetryAfter}, want: Cooldown{Wait: 50 * time.Millisecond, Longest: 10 * second}},
		"one that names no time is a guess":          {reply: &Reply{Class: verdict.Throttled, Source: verdict.NoHint}, want: Cooldown{Wait: 10 * second, Guess: true}},
		"an overload that names no time":             {reply: &Reply{Class: verdict.Overloaded, Source: verdict.NoHint}, want: Cooldown{Wait: 10 * second}},
		"an overload that names one":                 {reply: &Reply{Class: verdict.Overloaded, Wait: 3 * second, Source: verdict.RetryAfter}, want: Cooldown{Wait: 3 * second}},
		"a budget that is used up":                   {reply: &Reply{Class: verdict.Quota}, want: Cooldown{Wait: 5 * time.Minute}},
		"one that comes back at a time":              {reply: &Reply{Class: verdict.Quota, Wait: time.Minute, Source: verdict.ErrorText}, want: Cooldown{Wait: time.Minute}},
		"one that comes back far away":               {reply: &Reply{Class: verdict.Quota, Wait: 24 * time.Hour, Source: verdict.ErrorText}, want: Cooldown{Wait: 5 * time.Minute}},
		"one that is said to come back at once":      {reply: &Reply{Class: verdict.Quota, Wait: time.Second, Source: verdict.RetryAfter}, want: Cooldown{Wait: 10 * second}},
		"a failure":                                  {reply: &Reply{Class: verdict.Failed}, want: failure},
		"one of the midst of an upload":              {reply: &Reply{Class: verdict.Failed, Failure: Failure{Uploading: true}}},
		"a backend with too many streams":            {reply: &Reply{Class: verdict.Failed, Failure: Failure{Err: ErrLostAgain}}, busy: true},
		"one that serves nothing else":               {reply: &Reply{Class: verdict.Failed, Failure: Failure{Err: ErrLostAgain}}, want: failure},
		"no connection is the backend's fault alone": {reply: &Reply{Class: verdict.Unreachable}, want: Cooldown{Wait: 10 * second}},
		"no model":                                  {reply: &Reply{Class: verdict.NoModel}, kind: chat, want: wrong},
		"no model of another operation":             {reply: &Reply{Class: verdict.NoModel}, kind: files},
		"a refused credential":                      {reply: &Reply{Class: verdict.Credential, Status: 401}, kind: chat, want: wrong},
		"one that is refused for another operation": {reply: &Reply{Class: verdict.Credential, Status: 401}, kind: files},
		"no credential to send":                     {reply: &Reply{Class: verdict.NoCredential}, want: Cooldown{Wait: time.Minute}},
		"none for a shorter time":                   {reply: &Reply{Class: verdict.NoCredential, Wait: second}, want: Cooldown{Wait: second}},
		"a credential that has been replaced since": {reply: &Reply{Class: verdict.NoCredential, Status: 401}},
		"a request that came back":                  {reply: &Reply{Class: verdict.Loop, Status: 508}, kind: chat},
		"a silence":                                 {reply: &Reply{Class: verdict.Silent}},
		"a request that is too large":               {reply: &Reply{Class: verdict.TooLarge}},
		"a success":                                 {reply: &Reply{Class: verdict.Served}},
	} {
		c.reply.sent = &Outgoing{Traits: Traits{Kind: c.kind}}
		got, coolsDown := options.CooldownFor(c.reply, c.busy)
		if !coolsDown {
			got = Cooldown{}
		}
		if got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}
