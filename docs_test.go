package openailb_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/observe"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	_ "github.com/openai-lb/caddy-openai-lb/simulator"
)

// TestEveryConfigurationInTheDocsIsValid takes each block that is marked as
// caddyfile or json, checks that it is formatted as by `caddy fmt`, and loads
// it as `caddy validate` does. Synopses, and what is wrong on purpose, are
// marked as text.
func TestEveryConfigurationInTheDocsIsValid(t *testing.T) {
	fill, caddyfiles := surroundings(t), 0
	for _, b := range docsBlocks(t) {
		t.Run(b.where, func(t *testing.T) {
			config := `{}`
			switch b.language {
			case "caddyfile":
				caddyfiles++
				if formatted := string(caddyfile.Format([]byte(b.text))); formatted != b.text {
					t.Errorf("not formatted, `caddy fmt` makes of it:\n%s", formatted)
				}
				config = adaptBlock(t, fill(b.text))
			case "json":
				var first struct{ Handler, Apps any } // lines of a log have neither
				if err := json.NewDecoder(strings.NewReader(b.text)).Decode(&first); err != nil {
					t.Fatal(err)
				}
				if first.Handler != nil {
					config = handlerJSON(fill(b.text))
				} else if first.Apps != nil {
					config = fill(b.text)
				}
			}
			if err := lbtest.Validate(t, config); err != nil {
				t.Errorf("%v in:\n%s", err, config)
			}
		})
	}
	if caddyfiles < 10 {
		t.Errorf("found %d Caddyfiles in the docs, expected many more", caddyfiles)
	}
}

// TestPagesLeadToTheGlossaryAndTheREADMEBeginsWithACommand so that no reader
// meets a word that no page explains, a newcomer can run the balancer after one
// screen, and a contributor finds the command of the tests.
func TestPagesLeadToTheGlossaryAndTheREADMEBeginsWithACommand(t *testing.T) {
	for page, text := range pages(t, "README.md", "docs/*.md") {
		if page != "docs/glossary.md" && page != "docs/index.md" && !strings.Contains(text, "glossary.md)") {
			t.Errorf("%s has no link to the glossary", page)
		}
	}
	readme := string(lbtest.ReadFile(t, "README.md"))
	first, _, found := strings.Cut(readme, "\ngo run ./cmd/caddy run --config examples/quickstart/Caddyfile\n```")
	if lines := strings.Count(first, "\n"); !found || lines > 40 {
		t.Errorf("README.md has its first command after %d lines, want at most 40", lines)
	}
	if !strings.Contains(readme, "\ngo test ./...\n```") {
		t.Error("README.md does not say how to run the tests")
	}
}

// pages returns the texts of pages, by their names.
func pages(t *testing.T, patterns ...string) map[string]string {
	t.Helper()
	texts := make(map[string]string)
	for _, pattern := range patterns {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no pages in %s: %v", pattern, err)
		}
		for _, file := range files {
			texts[file] = string(lbtest.ReadFile(t, file))
		}
	}
	return texts
}

// TestLinksInTheDocsLeadSomewhere checks the links between files, and to the
// headings of pages.
func TestLinksInTheDocsLeadSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s#]*)(?:#([^)\s]+))?\)`)
	texts, links := pages(t, "*.md", "*/*.md", "examples/*/*.md", "charts/*/*.md", "bench/results/*.md"), 0
	for file, text := range texts {
		for _, match := range link.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			if strings.Contains(match[1], "://") {
				continue
			}
			links++
			target := file
			if match[1] != "" {
				target = filepath.Join(filepath.Dir(file), match[1])
			}
			if _, err := os.Stat(target); err != nil || match[2] != "" && !slices.Contains(anchors(texts[target]), match[2]) {
				t.Errorf("%s: the link %s leads nowhere", file, match[0])
			}
		}
	}
	if links < 100 {
		t.Errorf("found %d links in the docs, expected many more", links)
	}
}

// anchors are those that GitHub gives to the headings of a page.
func anchors(text string) (names []string) {
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		name := strings.ReplaceAll(strings.ToLower(heading[1]), " ", "-")
		names = append(names, regexp.MustCompile(`[^\p{L}\p{N}_-]`).ReplaceAllString(name, ""))
	}
	return names
}

// docsBlock is a fenced block of a page.
type docsBlock struct{ where, language, text string }

// docsBlocks returns the fenced blocks of the pages at the top and in docs/.
// The build lacks what those of azure/ need.
func docsBlocks(t *testing.T) (blocks []docsBlock) {
	t.Helper()
	for file, text := range pages(t, "*.md", "docs/*.md") {
		blocks = append(blocks, fencedBlocks(file, text)...)
	}
	return blocks
}

var fenced = regexp.MustCompile("(?ms)^([ \t]*)```(\\w*)\n(.*?)^[ \t]*```$")

func fencedBlocks(file, text string) (blocks []docsBlock) {
	for _, at := range fenced.FindAllStringSubmatchIndex(text, -1) {
		indent := regexp.MustCompile("(?m)^" + text[at[2]:at[3]])
		blocks = append(blocks, docsBlock{
			fmt.Sprintf("%s:%d", file, 1+strings.Count(text[:at[0]], "\n")), text[at[4]:at[5]], indent.ReplaceAllString(text[at[6]:at[7]], ""),
		})
	}
	return blocks
}

// linesInDocs returns the lines of blocks that begin so, and where their blocks
// are.
func linesInDocs(t *testing.T, beginning string) map[string]string {
	t.Helper()
	lines := make(map[string]string)
	for _, b := range docsBlocks(t) {
		for line := range strings.Lines(b.text) {
			if line = strings.TrimSpace(line); strings.HasPrefix(line, beginning) {
				lines[line] = b.where
			}
		}
	}
	return lines
}

// adaptBlock makes a block of a page JSON: it may be a part of a backend, of
// openai_lb or of a site, or a whole Caddyfile.
func adaptBlock(t *testing.T, text string) string {
	t.Helper()
	var errs []error
	for _, whole := range []string{":8080 {\nopenai_lb {\nbackend http://backend.example {\n%s}\n}\n}\n", ":8080 {\nopenai_lb {\n%s}\n}\n",
		":8080 {\nopenai_lb {\nbackend http://backend.example\n%s}\n}\n", ":8080 {\n%s}\n", "%s"} {
		config, err := lbtest.Adapt(fmt.Sprintf(whole, text))
		if err == nil {
			return config
		}
		errs = append(errs, err)
	}
	t.Fatalf("%v in:\n%s", errs, text)
	return ""
}

// surroundings makes what the configurations of the docs expect of a machine:
// variables, and a folder with files. It returns what puts that into a
// configuration. Modules of their own are left out: their own tests load them.
func surroundings(t *testing.T) (fill func(config string) string) {
	t.Helper()
	folder := t.TempDir()
	certificate, _ := lbtest.WriteCertificate(t)
	lbtest.WriteFile(t, folder+"/secret", "key-of-a-file\n")
	lbtest.WriteFile(t, folder+"/client-keys", "dave client-key-of-dave\n")
	lbtest.WriteFile(t, folder+"/limits", string(lbtest.ReadFile(t, "examples/limits")))
	t.Setenv("BACKEND_1_URL", "https://contoso.openai.azure.com")
	t.Setenv("BACKEND_1_PRIORITY", "1")
	t.Setenv("BACKEND_1_APIKEY", "key-of-backend-1")
	return func(config string) string {
		for pattern, with := range map[string]string{
			`\{env\.(\w+)\}`:                     "value-of-$1",
			`\{file\.[^}]+\}`:                    "{file." + folder + "/secret}",
			`/etc/ssl/private-ca\.pem`:           certificate,
			`(client_keys_file"?:? *"?)/[^\s"]+`: "${1}" + folder + "/client-keys",
			`(callers_file"?:? *"?)/[^\s"]+`:     "${1}" + folder + "/limits",
			`(?ms)^\s*state redis \{.*?^\s*\}$`:  "",
			// its last engine and the block end together
			`(?ms)^\s*state regions \{.*?^\s*\}\n\s*\}$`: "",
			`auth azure_identity`:                        "auth none",
			`output file [^\s{]+`:                        "output discard",
		} {
			config = regexp.MustCompile(pattern).ReplaceAllString(config, with)
		}
		return config
	}
}

// TestEachPromiseOfSecurityNamesItsTests keeps the promises of SECURITY.md tied
// to tests: each row of their table names at least one, no promise stands there
// twice, and each name in the page is that of a test. So it is with what we
// rely on in Caddy.
func TestEachPromiseOfSecurityNamesItsTests(t *testing.T) {
	name, tests := regexp.MustCompile("`((?:Test|Fuzz)\\w+)`"), ""
	for _, text := range pages(t, "*_test.go", "*/*_test.go", "*/*/*_test.go", "*/*/*/*_test.go") {
		tests += text
	}
	for page, header := range map[string]string{"SECURITY.md": "| promise | test |", "CONTRIBUTING.md": "| in Caddy, or net/http | test |"} {
		text := string(lbtest.ReadFile(t, page))
		for _, match := range name.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(tests, "\nfunc "+match[1]+"(") {
				t.Errorf("%s names %s, and there is no such test", page, match[1])
			}
		}
		_, table, _ := strings.Cut(text, header+"\n|---|---|\n")
		table, _, _ = strings.Cut(table, "\n\n")
		if strings.Count(table, "\n") < 20 {
			t.Errorf("found %q in %s, expected many more rows", table, page)
		}
		promised := make(map[string]bool)
		for row := range strings.Lines(table) {
			if promise := strings.TrimSpace(strings.Split(row, "|")[1]); promised[promise] {
				t.Errorf("%s says twice: %s", page, promise)
			} else {
				promised[promise] = true
			}
			if cells := strings.Split(row, "|"); len(cells) < 3 || !name.MatchString(cells[len(cells)-2]) {
				t.Errorf("%s names no test in: %s", page, row)
			}
		}
	}
}

// TestCommentsNameTestsThatExist checks the tests that comments of packages and
// types name for their promises.
func TestCommentsNameTestsThatExist(t *testing.T) {
	code, tests := make(map[string]string), ""
	for name, text := range pages(t, "*.go", "*/*.go", "*/*/*.go", "*/*/*/*.go") {
		if strings.HasSuffix(name, "_test.go") {
			tests += text
		} else {
			code[name] = text
		}
	}
	comment, name, found := regexp.MustCompile(`(?m)^//.*$`), regexp.MustCompile(`\b(?:Test|Fuzz)[A-Z]\w{7,}`), 0
	for file, text := range code {
		for _, line := range comment.FindAllString(text, -1) {
			for _, test := range name.FindAllString(line, -1) {
				if found++; !strings.Contains(tests, "\nfunc "+test+"(") {
					t.Errorf("%s names %s, and there is no such test", file, test)
				}
			}
		}
	}
	if found < 50 {
		t.Errorf("found %d names of tests, expected many more", found)
	}
}

// TestContributingHasALineForEachFileAndFolder so that a newcomer knows what is
// in it without opening it.
func TestContributingHasALineForEachFileAndFolder(t *testing.T) {
	text := lbtest.ReadFile(t, "CONTRIBUTING.md")
	files, _ := filepath.Glob("*.go")
	folders, _ := filepath.Glob("internal/*")
	for _, name := range append(files, folders...) {
		if base := filepath.Base(name); !strings.HasSuffix(base, "_test.go") && !regexp.MustCompile("(?m)^\\|[^|]*`"+regexp.QuoteMeta(base)+"`").Match(text) {
			t.Errorf("no table of CONTRIBUTING.md has a line for %s", name)
		}
	}
}

// TestEachOptionIsSetSomewhere holds the rule of CONTRIBUTING.md: an option
// that no example sets, and no page's task needs, is not added. The page of the
// options does not count: it has them all.
func TestEachOptionIsSetSomewhere(t *testing.T) {
	set := make(map[string]bool)
	for _, text := range pages(t, "examples/*Caddyfile", "examples/*/*Caddyfile") {
		findSet(set, text, "")
	}
	for _, b := range docsBlocks(t) {
		if b.language == "caddyfile" && !strings.HasPrefix(b.where, "docs/options.md:") {
			findSet(set, b.text, "openai_lb")
		}
	}
	option, options := regexp.MustCompile(`(?m)^\t+"(\w+)": +(?:directive|pools|backend|c)\b`), 0
	for file, blocks := range map[string][]string{
		"caddyfile.go": {"openai_lb"}, "internal/attempt/health.go": {"openai_lb"}, "internal/attempt/options.go": {"openai_lb"},
		"internal/backend/caddyfile.go": {"backend"}, "internal/affinity/options.go": {"affinity"}, "modules/callers/caddyfile.go": {"openai_lb", "caller", "tier"},
	} {
		for _, match := range option.FindAllStringSubmatch(string(lbtest.ReadFile(t, file)), -1) {
			options++
			if !slices.ContainsFunc(blocks, func(block string) bool { return set[block+" "+match[1]] }) {
				t.Errorf("no example sets %s of %s", match[1], blocks)
			}
		}
	}
	if options < 40 {
		t.Errorf("found only %d options", options)
	}
}

// findSet adds the options that a Caddyfile sets, after the names of the blocks
// that they are in.
func findSet(set map[string]bool, text, outermost string) {
	blocks := []string{outermost}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch {
		case len(words) == 0 || strings.HasPrefix(words[0], "#"):
			continue
		case words[0] == "}":
			blocks = blocks[:len(blocks)-1]
			continue
		}
		set[blocks[len(blocks)-1]+" "+words[0]] = true
		if words[len(words)-1] == "{" {
			blocks = append(blocks, words[0])
		}
	}
}

// TestErrorsInTheDocsAreThoseOfTheCode takes the errors that the docs show, as
// JSON or as a sentence in quotation marks: people search for them.
func TestErrorsInTheDocsAreThoseOfTheCode(t *testing.T) {
	var bodies, messages []string
	for _, e := range []apierror.Error{
		apierror.MissingKey, apierror.WrongKey, apierror.CompressedBody, apierror.UnknownPath, apierror.NoWebSocket, apierror.HeadersTooLarge, apierror.InvalidHeaders,
		apierror.UpstreamError, apierror.CredentialsRejected, apierror.Unreachable, apierror.BrokenOff, apierror.TimedOut,
		apierror.PerhapsExecuted, apierror.PerhapsStillExecuted, apierror.NotReady,
		apierror.RateLimited(time.Second, true, ""), apierror.RateLimited(9*time.Second, false, ""), apierror.Busy(time.Second, true, ""),
		apierror.RateLimited(9*time.Second, true, "the response 'resp_68f0'"),
		apierror.UnknownModel("gpt-5.6-sol", []string{"gpt-5.5", "gpt-5.6-luna"}), apierror.MissingModel([]string{"gpt-5.5", "gpt-5.6-luna"}),
		apierror.InvalidPath(openaiapi.CheckPath("//v1")), apierror.ModelBeyondBuffer(32 << 20),
	} {
		body, err := io.ReadAll(e.Response(httptest.NewRequest(http.MethodPost, "/", http.NoBody)).Body)
		if err != nil {
			t.Fatal(err)
		}
		bodies, messages = append(bodies, string(body)), append(messages, e.Message)
	}
	found := 0
	for line, where := range linesInDocs(t, `{"error":`) {
		if found++; !slices.Contains(bodies, line) {
			t.Errorf("%s: no error of the balancer is %s", where, line)
		}
	}
	for page, text := range pages(t, "docs/clients.md", "docs/replies.md", "docs/troubleshooting.md") {
		for _, quote := range regexp.MustCompile(`“([A-Z][^”…]*\.)”`).FindAllStringSubmatch(strings.ReplaceAll(text, "\n", " "), -1) {
			if found++; !slices.Contains(messages, quote[1]) {
				t.Errorf("%s: no error of the balancer is “%s”", page, quote[1])
			}
		}
	}
	if found < 5 {
		t.Errorf("found %d errors in the docs, expected more", found)
	}
}

// TestEveryClassOfAReplyIsExplained reads the classes where they are declared.
func TestEveryClassOfAReplyIsExplained(t *testing.T) {
	page := string(lbtest.ReadFile(t, "docs/replies.md"))
	declared := regexp.MustCompile(`Class = "(\w+)"`).FindAllSubmatch(lbtest.ReadFile(t, "internal/verdict/class.go"), -1)
	if len(declared) < 20 {
		t.Fatalf("found only %d classes", len(declared))
	}
	for _, class := range declared {
		if name := string(class[1]); !strings.Contains(page, "**"+name+"**") {
			t.Errorf("docs/replies.md does not explain the class %s", name)
		}
	}
}

// TestLogLinesInTheDocsAreThoseOfTheCode takes the lines about cooldowns that
// the docs show, and has each of them logged.
func TestLogLinesInTheDocsAreThoseOfTheCode(t *testing.T) {
	started := 0
	for line, where := range linesInDocs(t, `{"level"`) {
		var l struct {
			Msg, Pool, Backend, Deployment string
			Seconds                        float64
			Elsewhere                      bool
			pool.Cooldown
		}
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("%s: %v", where, err)
		}
		happening := map[string]pool.Happening{"cooldown started": pool.Began, "cooldown ended": pool.Ended}[l.Msg]
		if happening == 0 {
			continue
		}
		l.Model = l.Deployment
		length := time.Duration(l.Seconds * float64(time.Second)).Round(time.Microsecond)
		var logged bytes.Buffer
		logger := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{
			LevelKey: "level", NameKey: "logger", MessageKey: "msg", EncodeLevel: zapcore.LowercaseLevelEncoder, SkipLineEnding: true,
		}), zapcore.AddSync(&logged), zap.DebugLevel)).Named("http.handlers.openai_lb")
		bubble.Test(t, func(t *testing.T) {
			l.Since, l.Until = time.Now(), time.Now().Add(length)
			if happening == pool.Ended {
				time.Sleep(length)
			}
			observe.NewLog(logger, l.Pool).Happened(pool.Event{
				Happening: happening, Member: &pool.Member{Name: l.Backend}, Cooldown: l.Cooldown, Remote: l.Elsewhere,
			})
		})
		if logged.String() != line {
			t.Errorf("%s: the docs have\n%s\nand the log\n%s", where, line, logged.String())
		}
		if happening == pool.Ended {
			continue
		}
		started++
		if l.Class != string(verdict.Throttled) && l.Cause == "" || l.Status == 0 && l.Error == "" {
			t.Errorf("%s: the log says why: %s", where, line)
		}
	}
	if started < 8 {
		t.Errorf("found %d cooldowns in the docs, expected more", started)
	}
}
