package oidc

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// site is a Caddy that logs everything.
type site struct {
	t       *testing.T
	client  *http.Client
	url     string
	logs    string
	config  string
	backend *lbtest.Backend
	// tokens are all that were sent.
	mu     sync.Mutex
	tokens []string
}

// serve runs Caddy with these options of openai_lb, and one backend. At the end
// no part of a token may be in its log, or with the backend.
func serve(t *testing.T, options string) *site { return serveLogging(t, "json", options) }

// serveLogging is serve with this format of the log.
func serveLogging(t *testing.T, format, options string) *site {
	t.Helper()
	s := &site{t: t, client: lbtest.NewClient(t), logs: filepath.Join(t.TempDir(), "log.json")}
	var server *httptest.Server
	s.backend, server = lbtest.Listen(t, "a")
	port := lbtest.FreePort(t)
	s.url = fmt.Sprintf("http://127.0.0.1:%d", port)
	s.config = fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\nlog {\nlevel DEBUG\nformat %s\noutput file %s\n}\n}\nhttp://:%d {\nlog\nopenai_lb {\nbackend %s\n%%s\n}\n}", format, s.logs, port, server.URL)
	lbtest.Run(t, fmt.Sprintf(s.config, options))
	t.Cleanup(s.wantNoToken)
	return s
}

// oidcOf returns the option for an issuer.
func oidcOf(f *fakeIssuer, more string) string {
	return fmt.Sprintf("caller_identity oidc {\nissuer %s\naudience %s\ncaller azp\n%s\n}\n", f.URL, audience, more)
}

func (s *site) ask(token string, headers ...string) lbtest.Reply {
	s.mu.Lock()
	s.tokens = append(s.tokens, token)
	s.mu.Unlock()
	return lbtest.Ask(s.client, s.url+"/v1/chat/completions", append([]string{"Authorization", "Bearer " + token}, headers...)...)
}

func (s *site) wantNoToken() {
	log := string(lbtest.ReadFile(s.t, s.logs))
	for _, call := range s.backend.Received() {
		log += fmt.Sprint(call.Request.Header, call.Request.URL)
	}
	for _, token := range s.tokens {
		for part := range strings.SplitSeq(token, ".") {
			if i := strings.Index(log, part); len(part) > 40 && i >= 0 { // shorter ones are the same in all tokens
				s.t.Errorf("a part of a token is in the log, or with the backend: %s", log[max(0, i-1000):i])
			}
		}
	}
}

// logged returns the lines with a message.
func (s *site) logged(message string) (lines []map[string]any) {
	for line := range strings.Lines(string(lbtest.ReadFile(s.t, s.logs))) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil && entry["msg"] == message {
			lines = append(lines, entry)
		}
	}
	return lines
}

// reason returns why the last token was rejected.
func (s *site) reason() string {
	lines := s.logged("token rejected")
	if len(lines) == 0 {
		return ""
	}
	return fmt.Sprint(lines[len(lines)-1]["reason"])
}

// respelled writes the bits that end a token and mean nothing in another way.
func respelled(token string) string {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := strings.IndexByte(alphabet, token[len(token)-1])
	return token[:len(token)-1] + alphabet[last|1:][:1]
}

func TestOnlyATokenOfTheIssuerForUsIdentifiesItsCaller(t *testing.T) {
	first, elliptic, stranger := firstKey(), signer{"ec", jose.ES256, ecKey()}, signer{"first", jose.RS256, otherRSAKey()}
	f := newFakeIssuer(t, first, elliptic)
	s := serve(t, oidcOf(f, ""))
	at := func(d time.Duration) int64 { return time.Now().Add(d).Unix() }
	of := func(changed with) string { return f.token(t, first, changed) }
	public := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: must(x509.MarshalPKIXPublicKey(rsaKey().Public()))})
	part := func(text string) string { return base64.RawURLEncoding.EncodeToString([]byte(text)) }
	payload := part(string(must(json.Marshal(claimsOf(f.URL, nil)))))
	valid := of(nil)
	parts := strings.Split(valid, ".")
	admin := part(`{"iss":"` + f.URL + `","aud":"` + audience + `","azp":"admin","exp":99999999999}`)
	for _, c := range []struct {
		name, token, reason string
	}{
		{"a valid one", valid, ""},
		{"a valid one again", valid, ""},
		{"one of an elliptic curve", f.token(t, elliptic, nil), ""},
		{"RS512", f.token(t, signer{"first", jose.RS512, rsaKey()}, nil), ""},
		{"one that names none of two keys", f.token(t, signer{"", jose.RS256, rsaKey()}, nil), errNoKeyID.Error()},
		{"several audiences", of(with{"aud": []string{"other", audience}}), ""},
		{"expired, within the skew", of(with{"exp": at(-50 * time.Second)}), ""},
		{"not valid yet, within the skew", of(with{"nbf": at(50 * time.Second), "iat": at(50 * time.Second)}), ""},
		{"expired", of(with{"exp": at(-61 * time.Second)}), "the request has a key that has expired"},
		{"without an end", of(with{"exp": nil}), errNoExpiry.Error()},
		{"an end that is no number", of(with{"exp": "tomorrow"}), errNoExpiry.Error()},
		{"an end beyond all time", of(with{"exp": 1e300}), errNoExpiry.Error()},
		{"not valid yet", of(with{"nbf": at(70 * time.Second)}), errTooEarly.Error()},
		{"a beginning that is no number", of(with{"nbf": "now"}), errTooEarly.Error()},
		{"issued in the future", of(with{"iat": at(70 * time.Second)}), errTooEarly.Error()},
		{"another audience", of(with{"aud": "api://other"}), "the token is not for the load balancer"},
		{"no audience", of(with{"aud": nil}), "the token is not for the load balancer"},
		{"another issuer", of(with{"iss": "https://other.example"}), "the token is not for the load balancer"},
		{"an issuer with a slash", of(with{"iss": f.URL + "/"}), "the token is not for the load balancer"},
		{"a key of somebody else", f.token(t, stranger, nil), errSignature.Error()},
		{"a key that the issuer does not have", f.token(t, nextKey(), nil), errUnknown.Error()},
		{"a stranger's key without a name", f.token(t, signer{"", jose.RS256, otherRSAKey()}, nil), errNoKeyID.Error()},
		{"PS256", f.token(t, signer{"first", jose.PS256, rsaKey()}, nil), errSignature.Error()},
		{"none", part(`{"alg":"none"}`) + "." + payload + ".", errSignature.Error()},
		{"None", part(`{"alg":"None","kid":"first"}`) + "." + payload + ".", errSignature.Error()},
		{"none, with the signature of another", part(`{"alg":"none"}`) + "." + payload + "." + parts[2], errSignature.Error()},
		{"HS256 with the public key as PEM", sign(t, jose.HS256, "first", public, claimsOf(f.URL, nil)), errSignature.Error()},
		{"HS256 with the modulus", sign(t, jose.HS256, "first", rsaKey().N.Bytes(), claimsOf(f.URL, nil)), errSignature.Error()},
		{"a key in the token", selfSigned(t, f), errNoKeyID.Error()},
		{"another spelling", respelled(valid), errMalformed.Error()},
		{"another payload", parts[0] + "." + admin + "." + parts[2], errSignature.Error()},
		{"no JSON", "e30.e30x.e30", errMalformed.Error()},
		{"no caller", of(with{"azp": nil}), "the claim azp is not one text"},
		{"several callers", of(with{"azp": []string{"one", "two"}}), "the claim azp is not one text"},
		{"a caller that is no text in UTF-8", of(with{"azp": "team\ufffd"}), "the claim azp could be mistaken for another name"},
		{"a caller with a space at its end", of(with{"azp": "team "}), "the claim azp could be mistaken for another name"},
		{"a caller with a braille blank at its end", of(with{"azp": "team\u2800"}), "the claim azp could be mistaken for another name"},
		{"a caller with a Hangul filler", of(with{"azp": "te\u3164am"}), "the claim azp could be mistaken for another name"},
		{"a caller with a variation selector", of(with{"azp": "team\ufe0f"}), "the claim azp could be mistaken for another name"},
		{"a caller with a joiner", of(with{"azp": "team\u034f"}), "the claim azp could be mistaken for another name"},
		{"a caller that is called as all callers", of(with{"azp": "*"}), "the claim azp: expected the name of one caller, found *, which stands for all of them"},
		{"a caller that is a number", of(with{"azp": 7}), "the claim azp is not one text"},
		{"a caller that is empty", of(with{"azp": ""}), "the claim azp: expected a name of 1 to 64 bytes, found 0"},
		{"a caller with a line end", of(with{"azp": "team\nadmin"}), "the claim azp: expected a name of printable characters"},
		{"a caller that reads backwards", of(with{"azp": "team\u202e"}), "the claim azp: expected a name of printable characters"},
		{"a caller with a long name", of(with{"azp": strings.Repeat("x", 65)}), "the claim azp: expected a name of 1 to 64 bytes, found 65"},
	} {
		t.Run(c.name, func(t *testing.T) {
			reply := s.ask(c.token)
			if c.reason == "" {
				reply.WantServed(t, "a")
				return
			}
			reply.WantError(t, 401, "invalid_api_key")
			if got := s.reason(); got != c.reason {
				t.Errorf("the reason is %q, want %q", got, c.reason)
			}
		})
	}
	if n := f.fetches(); n != 1 { // they all came within the interval
		t.Errorf("the keys were fetched %d times", n)
	}
}

// selfSigned returns a token that brings the key which has signed it.
func selfSigned(t *testing.T, f *fakeIssuer) string {
	t.Helper()
	s, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.RS256, Key: otherRSAKey()}, &jose.SignerOptions{EmbedJWK: true})
	if err != nil {
		t.Fatal(err)
	}
	signed := must(s.Sign(must(json.Marshal(claimsOf(f.URL, nil)))))
	return must(signed.CompactSerialize())
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func TestATokenWithoutACallerIsWarnedOfOnce(t *testing.T) {
	f := newFakeIssuer(t, firstKey())
	s := serve(t, oidcOf(f, ""))
	token := f.token(t, firstKey(), with{"azp": nil})
	for range 3 {
		s.ask(token).WantError(t, 401, "invalid_api_key")
	}
	if lines := s.logged("token rejected"); len(lines) != 1 || lines[0]["level"] != "warn" {
		t.Errorf("logged: %v", lines)
	}
}

func TestATokensCallerHasItsLimitsTierAndUse(t *testing.T) {
	f := newFakeIssuer(t, firstKey())
	s := serve(t, "pool "+lbtest.Unique("oidc")+"\nclient_key team-one client-key-of-team-one\n"+oidcOf(f, "tier roles {\ngold-user gold\nsilver-user silver\n}")+`
		caller team-one {
			requests 2/hour
		}
		tier gold {
			models gpt-4o gold-model
		}
		tier silver {
			models gpt-4o silver-model
		}
		tier bronze default {
			models gpt-4o
		}`)
	models := func(token string) string {
		return lbtest.Get(s.client, s.url+"/v1/models", "Authorization", "Bearer "+token).Body
	}
	for _, c := range []struct {
		roles any
		want  string
	}{
		{[]string{"gold-user"}, "gold"}, {"silver-user", "silver"}, {[]any{7, "silver-user", "other"}, "silver"},
		{[]string{"silver-user", "gold-user"}, "gold"}, {nil, ""}, {"gold", ""}, {map[string]any{"gold-user": true}, ""},
	} {
		caller := fmt.Sprint("with ", c.roles)
		token := f.token(t, firstKey(), with{"azp": caller, "roles": c.roles})
		s.tokens = append(s.tokens, token)
		got := models(token)
		for _, tier := range []string{"gold", "silver"} {
			if strings.Contains(got, tier+"-model") != (tier == c.want) {
				t.Errorf("%s has %s, want %q", caller, got, c.want)
			}
		}
	}

	one := f.token(t, firstKey(), with{"sub": "user"})
	s.ask(one).WantServed(t, "a")
	s.ask("client-key-of-team-one").WantServed(t, "a") // a key and a token of one name are one caller
	s.ask(one).WantError(t, 429, "rate_limit_exceeded")
	usage := lbtest.Get(s.client, s.url+"/v1/usage", "Authorization", "Bearer "+one)
	if usage.Status != 200 || !strings.Contains(usage.Body, `"team-one"`) {
		t.Errorf("usage: %d %s", usage.Status, usage.Body)
	}
	s.ask(f.token(t, firstKey(), with{"azp": "team-two"})).WantServed(t, "a")
	if lines := s.logged("handled request"); len(lines) == 0 || !strings.Contains(fmt.Sprint(lines), "caller:team-two") {
		t.Error("the access log does not name team-two")
	}
	s.ask(one, "Api-Key", "client-key-of-team-one").WantError(t, 429, "rate_limit_exceeded")
	s.ask(f.token(t, firstKey(), with{"azp": "team-two"}), "Api-Key", "client-key-of-team-one").WantError(t, 401, "invalid_api_key")
}

func TestATokenIsGoodWhereKeysAre(t *testing.T) {
	f := newFakeIssuer(t, firstKey())
	s := serveLogging(t, "openai_lb", oidcOf(f, ""))
	token := f.token(t, firstKey(), nil)
	s.tokens = append(s.tokens, token)
	for _, headers := range [][]string{
		{"Api-Key", token}, {"X-Api-Key", token}, {"Sec-Websocket-Protocol", "realtime, openai-insecure-api-key." + token},
		{"Authorization", "Bearer " + token, "Ocp-Apim-Subscription-Key", token},
	} {
		lbtest.Ask(s.client, s.url+"/v1/chat/completions", headers...).WantServed(t, "a")
	}
	lbtest.Ask(s.client, s.url+"/v1/chat/completions?api-key="+token).WantServed(t, "a")
}

func TestTheKeysOfAnIssuerThatIsDownSurviveReloads(t *testing.T) {
	f := newFakeIssuer(t, firstKey())
	s := serve(t, oidcOf(f, ""))
	token := f.token(t, firstKey(), nil)
	s.ask(token).WantServed(t, "a")
	f.answers(503) // the issuer is down, and the config is loaded again
	for i := range 3 {
		lbtest.Reload(t, fmt.Sprintf(s.config, oidcOf(f, "")+fmt.Sprintf("lb_retries %d", i)))
		lbtest.WaitFor(t, func() bool { return s.ask(token).Err == nil })
		s.ask(f.token(t, firstKey(), with{"jti": i})).WantServed(t, "a")
	}
}

func TestKeysGoOnWhileTheIssuerIsDownAtTheStart(t *testing.T) {
	f := newFakeIssuer(t, firstKey())
	f.answers(503)
	s := serve(t, "client_key alice client-key-of-alice\n"+oidcOf(f, ""))
	token := f.token(t, firstKey(), nil)
	s.ask("client-key-of-alice").WantServed(t, "a")
	reply := s.ask(token)
	reply.WantError(t, 503, "token_unchecked")
	if reply.Header.Get("Retry-After") != "1" {
		t.Errorf("Retry-After is %q", reply.Header.Get("Retry-After"))
	}
	s.ask(token, "Api-Key", "client-key-of-alice").WantServed(t, "a")
	s.ask(token[:len(token)-8]+".x").WantError(t, 401, "invalid_api_key")
	f.answers(0)
	lbtest.WaitFor(t, func() bool { return s.ask(token).Status == 200 })
	if s.logged("could not fetch the issuer's keys") == nil || s.logged("fetched the issuer's keys") == nil {
		t.Error("the outage, or its end, is not logged")
	}
}
