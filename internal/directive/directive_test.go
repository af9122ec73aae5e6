package directive

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// settings have an option of each kind.
type settings struct {
	Name    string
	Key     string
	Keys    []string
	Pairs   []string
	Mode    string
	On      bool
	Count   int
	Weight  *int
	Ratio   float64
	Timeout caddy.Duration
	Delay   caddy.Duration
	Size    int64
	Policy  json.RawMessage
	Inner   string
	Block   string
}

func (s *settings) read(input string) error {
	return Unmarshal(caddyfile.NewTestDispenser(input), Options{
		"name": String(&s.Name).Check(func() error {
			if s.Name == "bad" {
				return errors.New("name 'bad' is not good")
			}
			return nil
		}),
		"key":  Secret(&s.Key),
		"keys": Strings(&s.Keys).Repeatable(),
		"pair": Args("a name and a value", 2, 2, func(args []string) error {
			if args[0] == "bad" {
				return errors.New("pair is not good")
			}
			s.Pairs = append(s.Pairs, args...)
			return nil
		}).Repeatable(),
		"mode":   OneOf(&s.Mode, "slow", "fast"),
		"on":     Flag(&s.On),
		"count":  Int(&s.Count, 1, MaxInt),
		"weight": IntPointer(&s.Weight, 10),
	}, Options{
		"ratio":   Float(&s.Ratio),
		"timeout": Duration(&s.Timeout),
		"delay":   DurationOrZero(&s.Delay),
		"size":    Size(&s.Size),
		"policy":  Module[reverseproxy.Selector](&s.Policy, "http.reverse_proxy.selection_policies", "policy"),
		"encoder": Module[reverseproxy.Selector](&s.Policy, "http.reverse_proxy.transport", "policy"),
		"block": Func(func(d *caddyfile.Dispenser) error {
			if err := Argument(d, &s.Block); err != nil {
				return err
			}
			return Block(d, Options{"inner": String(&s.Inner)})
		}),
	})
}

func TestEachOptionIsReadIntoItsField(t *testing.T) {
	weight := func(s settings) string {
		if s.Weight == nil {
			return "none"
		}
		return fmt.Sprint(*s.Weight)
	}
	for name, tc := range map[string]struct {
		block string
		got   func(settings) string
		want  string
	}{
		"a string":                        {"name a", func(s settings) string { return s.Name }, "a"},
		"a string in quotes":              {`name "a b"`, func(s settings) string { return s.Name }, "a b"},
		"a secret":                        {"key s", func(s settings) string { return s.Key }, "s"},
		"strings of several lines":        {"keys a b\nkeys c", func(s settings) string { return strings.Join(s.Keys, " ") }, "a b c"},
		"pairs of several lines":          {"pair a b\npair c \"\"", func(s settings) string { return fmt.Sprintf("%q", s.Pairs) }, `["a" "b" "c" ""]`},
		"a word":                          {"mode fast", func(s settings) string { return s.Mode }, "fast"},
		"a flag":                          {"on", func(s settings) string { return fmt.Sprint(s.On) }, "true"},
		"no flag":                         {"", func(s settings) string { return fmt.Sprint(s.On) }, "false"},
		"the highest number":              {"count 2147483647", func(s settings) string { return fmt.Sprint(s.Count) }, "2147483647"},
		"a number of 0":                   {"weight 0", weight, "0"},
		"no number":                       {"", weight, "none"},
		"a fraction":                      {"ratio 0.5", func(s settings) string { return fmt.Sprint(s.Ratio) }, "0.5"},
		"a duration in days":              {"timeout 1d", func(s settings) string { return fmt.Sprint(int64(s.Timeout)) }, "86400000000000"},
		"a duration of 0":                 {"delay 0", func(s settings) string { return fmt.Sprint(int64(s.Delay)) }, "0"},
		"a size":                          {"size 2KiB", func(s settings) string { return fmt.Sprint(s.Size) }, "2048"},
		"a module without options":        {"policy first", func(s settings) string { return string(s.Policy) }, `{"policy":"first"}`},
		"a module with arguments":         {"policy header X", func(s settings) string { return string(s.Policy) }, `{"field":"X","policy":"header"}`},
		"a module with a block":           {"policy header X {\nfallback first\n}\nname a", func(s settings) string { return s.Name + string(s.Policy) }, `a{"fallback":{"policy":"first"},"field":"X","policy":"header"}`},
		"a block in a block":              {"block a {\ninner b\n}\nname c", func(s settings) string { return s.Block + s.Inner + s.Name }, "abc"},
		"a block that is left out":        {"block a\nname c", func(s settings) string { return s.Block + s.Inner + s.Name }, "ac"},
		"a block in a block that is bare": {"block a {\n}\nname c", func(s settings) string { return s.Block + s.Inner + s.Name }, "ac"},
	} {
		t.Run(name, func(t *testing.T) {
			var s settings
			if err := s.read("test {\n" + tc.block + "\n}"); err != nil {
				t.Fatal(err)
			}
			if got := tc.got(s); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
	for _, input := range []string{"test", "test {\n}"} {
		if err := new(settings).read(input); err != nil {
			t.Errorf("%q is refused: %v", input, err)
		}
	}
}

func TestAMistakeIsRefusedByLineOptionAndValue(t *testing.T) {
	const known = "block, count, delay, encoder, key, keys, mode, name, on, pair, policy, ratio, size, timeout, weight"
	const hint = "(an environment variable in {$...} may be empty)"
	for block, want := range map[string]string{
		"names a":              "unrecognized option 'names': expected one of " + known + ", at Testfile:2",
		"name a\nname b":       "name is given twice, at Testfile:3",
		"on\non":               "on is given twice, at Testfile:3",
		"name":                 "name requires an argument " + hint + ", at Testfile:2",
		`name ""`:              "name requires an argument " + hint + ", at Testfile:2",
		"name a b":             "unexpected argument 'b' after name, at Testfile:2",
		"name a {\nx\n}":       "name does not take a block, at Testfile:3",
		"name {\nx\n}":         "name requires an argument " + hint + ", at Testfile:2",
		"name bad":             "name 'bad' is not good, at Testfile:2",
		"key":                  "key requires an argument " + hint + ", at Testfile:2",
		"key s3cret s3cret":    "key has too many arguments: quote a value that contains spaces, at Testfile:2",
		"key s3cret {\nx\n}":   "key does not take a block, at Testfile:3",
		"keys":                 "keys requires at least one argument, and none that is empty " + hint + ", at Testfile:2",
		`keys s3cret ""`:       "keys requires at least one argument, and none that is empty " + hint + ", at Testfile:2",
		"pair":                 "pair requires a name and a value, and has 0 arguments " + hint + ", at Testfile:2",
		"pair s3cret":          "pair requires a name and a value, and has 1 argument " + hint + ", at Testfile:2",
		"pair a s3cret s3cret": "pair requires a name and a value, and has 3 arguments, at Testfile:2",
		"pair bad s3cret":      "pair is not good, at Testfile:2",
		"mode Fast":            "mode 'Fast' is not one of slow, fast, at Testfile:2",
		"on yes":               "unexpected argument 'yes' after on, at Testfile:2",
		"count 0":              "count '0' is not a whole number of 1 or more, at Testfile:2",
		"count 2147483648":     "count '2147483648' is not a whole number of 1 or more, at Testfile:2",
		"weight 11":            "weight '11' is not a whole number from 0 to 10, at Testfile:2",
		"weight 1.5":           "weight '1.5' is not a whole number from 0 to 10, at Testfile:2",
		"ratio 0":              "ratio '0' is not a number above 0, at Testfile:2",
		"ratio NaN":            "ratio 'NaN' is not a number above 0, at Testfile:2",
		"ratio Inf":            "ratio 'Inf' is not a number above 0, at Testfile:2",
		"timeout 0":            "timeout '0' is not a duration above 0, such as 500ms, 10s or 2m, at Testfile:2",
		"timeout 10":           "timeout '10' is not a duration above 0",
		"delay -1s":            "delay '-1s' is not a duration, such as 0, 500ms or 10s, at Testfile:2",
		"size 0":               "size '0' is not a size with a unit, from 1B to 2GiB, such as 512KiB or 32MiB, at Testfile:2",
		"size 3GiB":            "size '3GiB' is not a size",
		"size 20EiB":           "size '20EiB' is not a size",
		"policy":               "policy requires an argument " + hint + ", at Testfile:2",
		"policy best":          "policy 'best' is not in this build: there are client_ip_hash, cookie, first, header, ip_hash, least_conn, query, random, random_choose, round_robin, uri_hash, weighted_round_robin, at Testfile:2",
		"encoder http":         "encoder 'http' is not allowed: a module of type *reverseproxy.HTTPTransport cannot be used here, at Testfile:2",
		"block a b":            "unexpected argument 'b' after block, at Testfile:2",
		"block a {\nouter b\n": "unrecognized option 'outer': expected one of inner, at Testfile:3",
	} {
		t.Run(block, func(t *testing.T) {
			err := new(settings).read("test {\n" + block + "\n}")
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("got  %v\nwant %s", err, want)
			}
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("the error shows a secret: %v", err)
			}
		})
	}
	err := new(settings).read("test me")
	if want := "unexpected argument 'me': the options of test belong in a block, at Testfile:1"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// A value that is refused must not stay behind: a field keeps its default.
func TestAValueThatIsRefusedIsNotSet(t *testing.T) {
	s := settings{Count: 5, Mode: "slow"}
	for _, block := range []string{"count 0", "mode Fast", "weight 11"} {
		if s.read("test {\n"+block+"\n}") == nil {
			t.Errorf("%s is accepted", block)
		}
	}
	if s.Count != 5 || s.Mode != "slow" || s.Weight != nil {
		t.Errorf("now %+v", s)
	}
}

func TestAMistakeOfSeveralOptionsIsRefusedByTheLineOfTheOneItNames(t *testing.T) {
	for wrong, line := range map[string]string{
		"min '5' is more than max": "Testfile:3", "max: it is less than min": "Testfile:2", "other is required": "Testfile:1",
	} {
		var low, high int
		err := Unmarshal(caddyfile.NewTestDispenser("x {\nmax 3\nmin 5\n}"),
			Options{"min": Int(&low, 1, 9)}.Check(func() error {
				if low != 5 || high != 3 {
					t.Error("it is checked before all is read")
				}
				return errors.New(wrong)
			}),
			Options{"max": Int(&high, 1, 9), "other": Int(&high, 1, 9)}.Check(func() error { return nil }))
		if err == nil || err.Error() != wrong+", at "+line {
			t.Errorf("got %v, want it at %s", err, line)
		}
	}
	if err := Unmarshal(caddyfile.NewTestDispenser("x {\n\"\" 3\n}"), Options{}.Check(func() error { return nil })); err == nil {
		t.Error("the check is taken for an option without a name")
	}
}
