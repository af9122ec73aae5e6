package operators

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// billed is a Caddy whose ledger is in a folder, with a config file and an
// admin API.
type billed struct {
	t                      *testing.T
	site, admin            string
	folder, file, contents string
}

func newBilled(t *testing.T) *billed {
	t.Helper()
	backend := httptest.NewServer(lbtest.Says(200, `{"id":"x","choices":[],"usage":{"prompt_tokens":70,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":40}}}`))
	t.Cleanup(backend.Close)
	b := &billed{t: t, folder: t.TempDir()}
	b.site, b.admin = fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t)), fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	b.contents = fmt.Sprintf("{\nadmin %s\ndefault_bind 127.0.0.1\nstorage file_system {\nroot %s\n}\n}\nhttp://%s {\nopenai_lb {\npool main\nbackend %s {\nname east\n}\nclient_key alice client-key-of-alice\nclient_key bob client-key-of-bob-0\n}\n}\n",
		b.admin, b.folder, b.site, backend.URL)
	b.file = filepath.Join(t.TempDir(), "Caddyfile")
	lbtest.WriteFile(t, b.file, b.contents)
	lbtest.Run(t, b.contents)
	return b
}

// chat sends chats with a key about a model.
func (b *billed) chat(key, model string, n int) {
	b.t.Helper()
	for range n {
		url := "http://" + b.site + "/v1/chat/completions"
		lbtest.Post(http.DefaultClient, url, `{"model":"`+model+`","messages":[]}`, "Authorization", "Bearer "+key).WantStatus(b.t, 200)
	}
}

// another saves a page of another replica with this storage.
func (b *billed) another(day, id string, rows string) {
	b.t.Helper()
	folder := filepath.Join(b.folder, "openai_lb", "ledger", day)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		b.t.Fatal(err)
	}
	lbtest.WriteFile(b.t, filepath.Join(folder, "main_"+id+".json"), `{"id":"`+id+`","pool":"main","day":"`+day+`","changes":1,"rows":[`+rows+`]}`)
}

// usage runs `caddy openai-lb usage`, and returns what it prints with single
// spaces.
func (b *billed) usage(args ...string) (output string, err error) {
	b.t.Helper()
	var out bytes.Buffer
	err = runCommand(&out, append([]string{"usage"}, args...)...)
	var lines []string
	for line := range strings.Lines(out.String()) {
		if !strings.HasPrefix(line, "Error:") { // which is err
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
	}
	return strings.Join(lines, "\n"), err
}

// get asks the admin API.
func (b *billed) get(query string) lbtest.Reply {
	return (&operated{t: b.t, admin: b.admin, client: http.DefaultClient}).call(http.MethodGet, "/openai_lb/usage"+query)
}

// want checks what it prints.
func (b *billed) want(want string, args ...string) {
	b.t.Helper()
	if got, err := b.usage(args...); err != nil || got != want {
		b.t.Errorf("%q printed (%v)\n%s\nwant\n%s", args, err, got, want)
	}
}

func (b *billed) write(text string) (name string) {
	b.t.Helper()
	name = filepath.Join(b.t.TempDir(), "file.csv")
	lbtest.WriteFile(b.t, name, text)
	return name
}

func TestUsageAddsUpTheLedgersOfAllReplicas(t *testing.T) {
	b := newBilled(t)
	b.chat("client-key-of-alice", "gpt-4o", 2)
	b.chat("client-key-of-alice", "o3", 1)
	b.chat("client-key-of-bob-0", "gpt-4o", 3)
	today, month := time.Now().UTC().Format(time.DateOnly), time.Now().UTC().Format("2006-01")
	b.another(today, "0123456789abcdef", `{"caller":"bob","model":"gpt-4o","backend":"west","service_tier":"flex","requests":1,"input":7,"output":5,"estimated_input":3,"estimated_output":2}`)
	b.another("2020-01-31", "0123456789abcdef", `{"caller":"bob","model":"gpt-4o","backend":"west","service_tier":"default","requests":1}`)
	const header, csvHeader = "REQUESTS INPUT CACHED OUTPUT REASONING ESTIMATED INPUT ESTIMATED OUTPUT", "requests,input,cached,output,reasoning,estimated_input,estimated_output"
	all := "CALLER MODEL " + header + "\nalice gpt-4o 2 140 80 100 0 0 0\nalice o3 1 70 40 50 0 0 0\nbob gpt-4o 4 217 120 155 0 3 2"
	var pages []struct{ ID, Day string }
	got := b.get("")
	if err := json.Unmarshal([]byte(got.Body), &pages); err != nil || len(pages) != 2 {
		t.Errorf("the admin API answers %s (%v)", got.Body, err)
	}
	b.want(csvHeader+"\n7,427,240,305,0,3,2", "--by", "", "--format", "csv", "--address", b.admin)
	b.want(all, "--address", b.admin)
	b.want(all, "--address", b.admin, "--address", b.admin, "--month", month)
	b.want("DAY POOL BACKEND SERVICE TIER "+header+"\n"+today+" main east default 6 420 240 300 0 0 0\n"+today+" main west flex 1 7 0 5 0 3 2",
		"--address", b.admin, "--by", "day,pool,backend,service_tier", "--day", today)
	b.want("caller,"+csvHeader+"\nalice,3,210,120,150,0,0,0\nbob,3,210,120,150,0,0,0", "--address", b.admin, "--by", "caller", "--format", "csv", "--backend", "east", "--pool", "main")
	b.want(`[{"cached":0,"caller":"bob","estimated_input":0,"estimated_output":0,"input":0,"output":0,"reasoning":0,"requests":1}]`, "--address", b.admin, "--by", "caller", "--json", "--day", "2020-01-31")
	b.want("CALLER MODEL "+header, "--address", b.admin, "--month", "2020-02")
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	http.DefaultClient.CloseIdleConnections() // a POST on a closed one would fail
	b.want(all, "--config", b.file)
	config, err := lbtest.Adapt(b.contents)
	if err != nil {
		t.Fatal(err)
	}
	asJSON := filepath.Join(t.TempDir(), "caddy.json")
	lbtest.WriteFile(t, asJSON, config)
	b.want(all, "--config", asJSON, "--pool", "main")
	b.want("CALLER MODEL "+header, "--config", asJSON, "--pool", "other")
	lbtest.Reload(t, b.contents) // a new process
	b.chat("client-key-of-alice", "gpt-4o", 1)
	b.want(strings.Replace(all, "2 140 80 100", "3 210 120 150", 1), "--address", b.admin)
}

func TestUsageMultipliesWithPrices(t *testing.T) {
	b := newBilled(t)
	day, row := "2026-11-25", func(model, tier, rest string) string {
		return `{"caller":"alice","model":"` + model + `","backend":"east","service_tier":"` + tier + `","requests":1` + rest + `}`
	}
	b.another(day, "0123456789abcdef", strings.Join([]string{
		row("gpt-4o", "default", `,"input":1000000,"cached":400000,"output":100000,"estimated_input":200000,"estimated_output":50000`),
		row("gpt-4o", "priority", `,"input":1000000`), row("o3", "default", `,"input":5`), row("", "default", "")}, ","))
	prices := b.write("\xef\xbb\xbfModel,service_tier,Input,cached,output\ngpt-4o,,2.5,1.25,10\ngpt-4o,priority,5,,20\n")
	args := []string{"--config", b.file, "--day", day, "--prices", prices, "--format", "csv", "--by"}
	const header = "requests,input,cached,output,reasoning,estimated_input,estimated_output,cost"
	b.want("no price for o3 (service tier default): no cost\nmodel,"+header+"\n,1,0,0,0,0,0,0,0.0000\ngpt-4o,2,2000000,400000,100000,0,200000,50000,9.0000\no3,1,5,0,0,0,0,0,", append(args, "model")...)
	b.want("no price for o3 (service tier default): no cost\ncaller,"+header+"\nalice,4,2000005,400000,100000,0,200000,50000,", append(args, "caller")...)
	b.want("model,"+header, "--config", b.file, "--day", "2026-11-24", "--prices", prices, "--format", "csv", "--by", "model")
	for text, want := range map[string]string{
		"":                                 "file.csv: it is empty: expected a line with the names of its columns",
		"model,input\n":                    "file.csv: there is no column 'output': expected model, service_tier, input, cached, output, of which service_tier and cached may be missing",
		"model,input,output\ngpt-4o,1,x\n": "file.csv: line 2: output 'x' is not a price of a million tokens, such as 2.50",
		"model,input,output\na,1,1\na,1,2": "file.csv: line 3: model 'a' with service_tier '' is given twice",
		"model,input,output\na,1\n":        "file.csv: record on line 2: wrong number of fields",
		"model,input,output,service_tier\na,1,1,prio\n": "file.csv: line 2: service_tier 'prio' is not known: expected one of auto, default, flex, fast, priority, ultrafast",
	} {
		if _, err := b.usage("--config", b.file, "--prices", b.write(text)); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", text, err, want)
		}
	}
}

func TestAModelThatAClientMadeUpIsNoFormulaOfASpreadsheet(t *testing.T) {
	b := newBilled(t)
	want := "model,requests,input,cached,output,reasoning,estimated_input,estimated_output"
	for _, model := range []struct{ name, shown string }{
		{"=HYPERLINK(0)", "'=HYPERLINK(0)"}, {"a-1;b=2", "a-1;b=2"}, {"a;=1+1", "a;'=1+1"}, {`b; \"+1\"`, `"b;' ""+1"""`},
	} {
		b.chat("client-key-of-alice", model.name, 1)
		want += "\n" + model.shown + ",1,70,40,50,0,0,0"
	}
	b.want(want, "--address", b.admin, "--by", "model", "--format", "csv")
}

func TestUsageComparesWithAProvidersExport(t *testing.T) {
	b := newBilled(t)
	b.another("2026-11-25", "0123456789abcdef", `{"caller":"alice","model":"gpt-4o","backend":"east","service_tier":"default","requests":9,"input":1000,"output":495,"estimated_output":4},
		{"caller":"alice","model":"o3","backend":"west","service_tier":"default","requests":9,"input":2000,"output":700},
		{"caller":"alice","model":"o4","backend":"west","service_tier":"default","requests":9}`)
	openAI := "start_time,start_time_iso,project_id,num_model_requests,model,input_tokens,output_tokens,input_cached_tokens,input_audio_tokens,output_audio_tokens\n" +
		"1764028800,2026-11-25T00:00:00+00:00,proj_1,4,gpt-4o-2024-08-06,600,300,0,0,0\n1764028800,2026-11-25T00:00:00+00:00,proj_1,4,gpt-4o,390,195,0,10,\n1764028800,2026-10-25T00:00:00+00:00,proj_1,4,gpt-4o,999,999,0,0,0\n"
	azure := "TimeStamp,ModelDeploymentName,ProcessedPromptTokens,GeneratedTokens\n2026-11-25 13:00:00,o3,1500.0,700\n2026-11-25 14:00:00,o3,400,0\n"
	const header = "MODEL INPUT EXPORTED INPUT INPUT PERCENT OUTPUT EXPORTED OUTPUT OUTPUT PERCENT\n"
	of := func(args ...string) []string {
		return append([]string{"--config", b.file, "--month", "2026-11"}, args...)
	}
	b.want(header+"gpt-4o 1000 1000 0.0000 499 495 0.8081", of("--check", b.write(openAI), "--backend", "east", "--columns", "output=output_tokens")...)
	if got, err := b.usage(of("--check", b.write(azure), "--backend", "west")...); err == nil || err.Error() != "the tokens of 1 of 1 model differ by more than 1%" || got != header+"o3 2000 1900 5.2632 700 700 0.0000" {
		t.Errorf("got %v\n%s", err, got)
	}
	if got, err := b.usage(of("--check", b.write(azure))...); err == nil || err.Error() != "the tokens of 2 of 2 models differ by more than 1%" || !strings.Contains(got, "gpt-4o 1000 0 - 499 0 -") {
		t.Errorf("got %v\n%s", err, got)
	}
	b.want("model,input,exported_input,input_percent,output,exported_output,output_percent\no3,2000,2000,0.0000,700,700,0.0000",
		of("--check", b.write("Deployment name,in,out\no3,2000,700\n"), "--backend", "west", "--columns", "model=Deployment name,input=in,output=out", "--format", "csv")...)
	for text, want := range map[string]string{
		"a,b\n1,2\n":                                 "no column has the model, or none has tokens: name them, as in model=Deployment,input=Tokens; there are a, b",
		"model,input_tokens\no3,many\n":              "line 2: input_tokens 'many' is not a number of tokens",
		"model,input_tokens,date\no3,1,x\n":          "line 2: 'x' is not a date such as 2026-11-25",
		"model,input_tokens,date\no3,1,2026-10-01\n": "there is nothing to compare: neither the ledger nor the export has tokens of that time",
	} {
		if _, err := b.usage(of("--check", b.write(text), "--backend", "none")...); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", text, err, want)
		}
	}
}

func TestUsageRefusesWhatItCannotDo(t *testing.T) {
	b := newBilled(t)
	elsewhere := b.write(fmt.Sprintf("{\nstorage file_system %s\n}\n", t.TempDir()))
	for want, args := range map[string][]string{
		"has no ledger that can be read: it is saved 10 s after a request, in the storage of the user who runs Caddy": {"--config", elsewhere, "--adapter", "caddyfile"},
		"'inputs' is not one of day, input, input_audio, model, output, output_audio":                                 {"--config", b.file, "--check", b.write("model,input_tokens\n"), "--columns", "inputs=Tokens"},
		"by 'colour' is not a column: expected some of day, pool, caller, model, backend, service_tier":               {"--by", "caller,colour"},
		"format 'xml' is not one of table, csv":                                                                       {"--format", "xml"},
		"'2026-13' is not a month or a day such as 2026-11 or 2026-11-25":                                             {"--month", "2026-13"},
		"no pool is called 'other': there are main":                                                                   {"--address", b.admin, "--pool", "other"},
		"if any flags in the group [config address] are set none of the others can be; [address config] were all set": {"--config", b.file, "--address", b.admin},
		"could not read the storage of /nowhere: open /nowhere: no such file or directory":                            {"--config", "/nowhere"},
		"there is no column 'Tokens': there are model, input_tokens":                                                  {"--config", b.file, "--check", b.write("model,input_tokens\n"), "--columns", "input=Tokens"},
	} {
		if got, err := b.usage(args...); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%q: got %v, want %s; printed is %s", args, err, want, got)
		}
	}
	for query, want := range map[string]string{"?days=2026": "query parameter days: '2026' is not a month", "?by=model": "query parameter 'by': expected"} {
		if got := b.get(query); got.Status < 400 || !strings.Contains(got.Body, want) {
			t.Errorf("%s: got %d %s", query, got.Status, got.Body)
		}
	}
}

// A power cut may leave an empty file.
func TestUsageLeavesOutAPageThatCannotBeRead(t *testing.T) {
	b := newBilled(t)
	b.another("2020-01-31", "0123456789abcdef", `{"caller":"bob","model":"gpt-4o","backend":"west","service_tier":"default","requests":1}`)
	folder := filepath.Join(b.folder, "openai_lb", "ledger", "2020-01-31")
	lbtest.WriteFile(t, filepath.Join(folder, "main_abc.json"), "")
	lbtest.WriteFile(t, filepath.Join(folder, "main_def.json"), `{"rows":[{"requests":"many"}]}`)
	const table = "CALLER REQUESTS INPUT CACHED OUTPUT REASONING ESTIMATED INPUT ESTIMATED OUTPUT\nbob 1 0 0 0 0 0 0"
	for _, from := range [][]string{{"--address", b.admin}, {"--config", b.file}} {
		got, err := b.usage(append(from, "--by", "caller", "--month", "2020-01")...)
		if err != nil || !strings.HasSuffix(got, table) || strings.Count(got, "left out: could not read the ledger openai_lb/ledger/2020-01-31/main_") != 2 {
			t.Errorf("%q printed (%v)\n%s", from, err, got)
		}
	}
}
