package affinity

import (
	"bytes"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
)

const secretOfAlice = "ek_68f0c1d2e3f405162738495a6b7c8d9e"

// makesSecret has the account make a client secret for a caller, by a key with
// an id or by a token.
func (a *Affinity) makesSecret(account, caller, keyID, reply string) {
	body := openaiapi.ParseJSON([]byte(`{}`), nil)
	p, _, _ := a.Place(&Query{Method: http.MethodPost, Operation: "/realtime/client_secrets", Body: &body, Caller: caller, KeyID: keyID})
	res := &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {openaiapi.TypeJSON}}, ContentLength: int64(len(reply))}
	p.Served(account, res)
	p.IDReader(account, res).Watch([]byte(reply), true)
}

// secretReply is the reply with the secret, which is good for so long.
func secretReply(good time.Duration) string {
	return fmt.Sprintf(`{"value":%q,"expires_at":%d}`, secretOfAlice, time.Now().Add(good).Unix())
}

// TestAClientSecretIsGoodAtEachReplica until it expires, and is stored nowhere.
func TestAClientSecretIsGoodAtEachReplica(t *testing.T) {
	for _, accounts := range [][]string{{"a", "b"}, {"b"}} {
		for _, caller := range []string{"alice", ""} {
			inTouch(t, func(s *shared) {
				one, other := s.replica(accounts...), s.replica(accounts...)
				keyID := ""
				if caller != "" {
					keyID = "1"
				}
				one.makesSecret("b", caller, keyID, secretReply(10*time.Minute))
				synctest.Wait()
				want := Secret{Account: "b", By: MinterOf(caller, keyID)}
				for name, a := range map[string]*Affinity{"its replica": one, "another one": other} {
					if got, ok := a.Secret(secretOfAlice); !ok || got != want {
						t.Errorf("%s knows %+v, %v, want %+v", name, got, ok, want)
					}
					if _, ok := a.Secret(secretOfAlice + "0"); ok {
						t.Errorf("%s takes a secret that nobody has made", name)
					}
					if bytes.Contains(a.owners.memory.Save(time.Now()), []byte(secretOfAlice[3:])) {
						t.Errorf("%s saves the secret itself", name)
					}
				}
				time.Sleep(10 * time.Minute)
				for _, a := range []*Affinity{one, other} {
					if _, ok := a.Secret(secretOfAlice); ok {
						t.Error("it is good after it has expired")
					}
				}
			})
		}
	}
}

// TestAClientSecretIsOfItsKeyAlone so that it ends with that, and not with
// another key of the caller, nor of another one.
func TestAClientSecretIsOfItsKeyAlone(t *testing.T) {
	seen := make(map[ownership.CallerDigest]string)
	for _, minter := range [][2]string{{"alice", "1"}, {"alice", "2"}, {"bob", "1"}, {"alice", ""}, {"bob", ""}} {
		by := MinterOf(minter[0], minter[1])
		if other, again := seen[by]; again || by == ownership.CallerNamed(minter[0]) {
			t.Errorf("%v is the same as %s", minter, other)
		}
		seen[by] = fmt.Sprint(minter)
	}
	if MinterOf("", "1") != 0 {
		t.Error("without a name, there is no caller")
	}
}

// TestWhatIsNoClientSecretTeachesNone and a token's caller is known by name.
func TestWhatIsNoClientSecretTeachesNone(t *testing.T) {
	inTouch(t, func(s *shared) {
		a := s.replica("a", "b")
		for _, reply := range []string{
			secretReply(-time.Second), `{"value":"` + secretOfAlice + `"}`, `{"value":"` + secretOfAlice + `","expires_at":"soon"}`, `{"value":"sk-1234567890123456","expires_at":4000000000}`,
			`{"session":{"value":"` + secretOfAlice + `","expires_at":4000000000}}`, `[` + secretReply(time.Hour) + `]`, `{"value":"ek_`,
		} {
			a.makesSecret("a", "alice", "1", reply)
			if got, ok := a.Secret(secretOfAlice); ok {
				t.Errorf("%s teaches %+v", reply, got)
			}
		}
		a.makesSecret("a", "alice", "", `{"id":"sess_12345678","client_secret":`+secretReply(time.Minute)+`}`)
		if got, ok := a.Secret(secretOfAlice); !ok || got.TokenOf != "alice" {
			t.Errorf("it is %+v, %v", got, ok)
		}
		// the first reply with a secret counts: repeating the secret in
		// another reply does not change its caller
		a.makesSecret("b", "bob", "2", secretReply(time.Hour))
		if got, _ := a.Secret(secretOfAlice); got.TokenOf != "alice" || got.Account != "a" {
			t.Errorf("it is %+v", got)
		}
	})
}

// TestClientSecretsOfACallerAreBounded and the oldest are forgotten first.
func TestClientSecretsOfACallerAreBounded(t *testing.T) {
	inTouch(t, func(s *shared) {
		a := s.replica("a")
		secret := func(n int) string { return fmt.Sprintf("ek_%032d", n) }
		for n := range maxSecrets + 1 {
			a.makesSecret("a", "alice", "1", fmt.Sprintf(`{"value":%q,"expires_at":%d}`, secret(n), time.Now().Add(time.Hour).Unix()))
		}
		a.others = nil // which keep more
		for n, want := range map[int]bool{0: false, 1: true, maxSecrets: true} {
			if _, ok := a.Secret(secret(n)); ok != want {
				t.Errorf("secret %d is known: %v", n, ok)
			}
		}
	})
}

func TestHoldersOfTokensAreBounded(t *testing.T) {
	var h tokenHolders
	for i := range 3 * maxTokenHolders {
		name := fmt.Sprint("user ", i)
		h.set(MinterOf(name, ""), name)
		if got := h.get(MinterOf(name, "")); got != name {
			t.Fatalf("the latest holder is %q, want %q", got, name)
		}
		if len(h.names) > maxTokenHolders {
			t.Fatalf("%d names are remembered", len(h.names))
		}
	}
}
