package openailb_test

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	_ "github.com/openai-lb/caddy-openai-lb/simulator"
)

// TestEveryConfigurationInTheDocsIsValid takes each block of the docs that is
// marked as caddyfile or json, checks that it is formatted as `caddy fmt` does
// it, and loads it as `caddy validate` does. Synopses and configurations that
// are wrong on purpose are marked as text.
func TestEveryConfigurationInTheDocsIsValid(t *testing.T) {
	surroundings := newSurroundings(t)
	caddyfiles := 0
	for _, b := range docsBlocks(t) {
		if b.language == "caddyfile" {
			caddyfiles++
		}
		t.Run(b.where, func(t *testing.T) {
			switch b.language {
			case "caddyfile":
				if formatted := string(caddyfile.Format([]byte(b.text))); formatted != b.text {
					t.Errorf("not formatted, `caddy fmt` makes of it:\n%s", formatted)
				}
				surroundings.validate(t, adaptBlock(t, surroundings.fill(b.text)))
			case "json":
				if config := wholeJSON(t, b.text); config != "" {
					surroundings.validate(t, surroundings.fill(config))
				}
			}
		})
	}
	if caddyfiles < 10 {
		t.Errorf("found %d blocks marked as caddyfile in the docs, expected many more", caddyfiles)
	}
}

// TestPagesAreShortAndLeadToTheGlossary keeps each page to one reader, and all pages to what a reader has the time for. The
// README begins with how to run it and how to test it.
func TestPagesAreShortAndLeadToTheGlossary(t *testing.T) {
	const most, mostOfCell = 27000, 25
	limits := map[string]int{"README.md": 1000, "CONTRIBUTING.md": 1600, "SECURITY.md": 2000, "bench/README.md": 2500, "charts/caddy-openai-lb/README.md": 400}
	all := 0
	for page, text := range pages(t, "*.md", "*/*.md", "charts/*/*.md") {
		isDoc, words := strings.HasPrefix(page, "docs/"), len(strings.Fields(text))
		limit, limited := limits[page]
		if isDoc {
			limit, limited, all = 3200, true, all+words
		}
		if limited && words > limit {
			t.Errorf("%s has %d words, expected %d at most", page, words, limit)
		}
		if !isDoc && page != "README.md" {
			continue
		}
		if page != "docs/glossary.md" && page != "docs/index.md" && !strings.Contains(text, "glossary.md)") {
			t.Errorf("%s has no link to the glossary", page)
		}
		for _, row := range regexp.MustCompile(`(?m)^\|.*`).FindAllString(strings.ReplaceAll(text, `\|`, " "), -1) {
			for cell := range strings.SplitSeq(row, "|") {
				if words := len(strings.Fields(cell)); words > mostOfCell {
					t.Errorf("%s: a cell of %d words, expected %d at most: %s", page, words, mostOfCell, cell)
				}
			}
		}
	}
	if all > most {
		t.Errorf("the pages in docs have %d words, expected %d at most", all, most)
	}
	first, _, _ := strings.Cut(string(lbtest.ReadFile(t, "README.md")), "## Install")
	for _, command := range []string{"go run ./cmd/caddy run --config examples/quickstart/Caddyfile", "go test ./..."} {
		if !strings.Contains(first, "\n"+command+"\n```") {
			t.Errorf("README.md does not begin with the command %s", command)
		}
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
	block := regexp.MustCompile("(?ms)^[ \t]*```.*?^[ \t]*```$")
	link := regexp.MustCompile(`\]\(([^)\s#]*)(?:#([^)\s]+))?\)`)
	texts, links := pages(t, "*.md", "*/*.md", "examples/*/*.md", "charts/*/*.md", "bench/results/*.md"), 0
	for file, text := range texts {
		texts[file] = block.ReplaceAllString(text, "")
	}
	for file, text := range texts {
		for _, match := range link.FindAllStringSubmatch(text, -1) {
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
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(text, -1) {
		name := strings.ReplaceAll(strings.ToLower(heading[1]), " ", "-")
		names = append(names, regexp.MustCompile(`[^\p{L}\p{N}_-]`).ReplaceAllString(name, ""))
	}
	return names
}

// docsBlock is a fenced block of a page.
type docsBlock struct{ where, language, text string }

// docsBlocks returns the fenced blocks of the pages at the top and in docs/.
// Those of azure/ need a module that is not in this build.
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

// adaptBlock makes a block of a page JSON: it may be a part of a backend, of openai_lb or of a site, or a whole Caddyfile.
func adaptBlock(t *testing.T, text string) string {
	t.Helper()
	var errs []error
	for _, whole := range []string{":8080 {\nopenai_lb {\nbackend http://backend.example {\n%s}\n}\n}\n", ":8080 {\nopenai_lb {\n%s}\n}\n",
		":8080 {\nopenai_lb {\nbackend http://backend.example\n%s}\n}\n", ":8080 {\n%s}\n", "%s"} {
		config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(fmt.Appendf(nil, whole, text), map[string]any{"filename": "Caddyfile"})
		if err == nil {
			return string(config)
		}
		errs = append(errs, err)
	}
	t.Fatalf("%v in:\n%s", errs, text)
	return ""
}

// optionsIn are the options that a file reads from a Caddyfile.
func optionsIn(t *testing.T, file string) (options []string) {
	t.Helper()
	for _, option := range regexp.MustCompile(`(?m)^\t+"(\w+)": +(?:directive|pools|backend|c)\b`).FindAllSubmatch(lbtest.ReadFile(t, file), -1) {
		options = append(options, string(option[1]))
	}
	return options
}

// wholeJSON makes a JSON block a whole configuration. Lines of a log are none.
func wholeJSON(t *testing.T, text string) string {
	t.Helper()
	var fields map[string]json.RawMessage
	if err := json.NewDecoder(strings.NewReader(text)).Decode(&fields); err != nil {
		t.Fatal(err)
	}
	if fields["handler"] != nil {
		return fmt.Sprintf(`{"apps":{"http":{"servers":{"docs":{"listen":[":8080"],"routes":[{"handle":[%s]}]}}}}}`, text)
	}
	if fields["apps"] == nil {
		return ""
	}
	return text
}

// surroundings are what the configurations of the docs expect of a machine: variables, and a folder with files, where Caddy
// stores something as well.
type surroundings string

func newSurroundings(t *testing.T) surroundings {
	t.Helper()
	folder := t.TempDir()
	certificate, err := lbtest.NewCertificate(time.Now().Add(time.Hour), "ca.example.com")
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string][]byte{
		"/secret":      []byte("key-of-a-file\n"),
		"/client-keys": []byte("dave client-key-of-dave\n"),
		"/ca.pem":      pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Certificate[0]}),
	} {
		if err := os.WriteFile(folder+file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("BACKEND_1_URL", "https://contoso.openai.azure.com")
	t.Setenv("BACKEND_1_PRIORITY", "1")
	t.Setenv("BACKEND_1_APIKEY", "key-of-backend-1")
	return surroundings(folder)
}

// fill puts into a configuration what is there on the machine that it is for. Modules of their own are left out: their own
// tests load them.
func (s surroundings) fill(config string) string {
	for pattern, with := range map[string]string{
		`\{env\.(\w+)\}`:                     "value-of-$1",
		`\{file\.[^}]+\}`:                    "{file." + string(s) + "/secret}",
		`/etc/ssl/private-ca\.pem`:           string(s) + "/ca.pem",
		`(client_keys_file"?:? *"?)/[^\s"]+`: "${1}" + string(s) + "/client-keys",
		`(?ms)^\s*state redis \{.*?^\s*\}$`:  "",
		`auth azure_identity`:                "auth none",
	} {
		config = regexp.MustCompile(pattern).ReplaceAllString(config, with)
	}
	return config
}

// validate loads a configuration without starting it. It writes to the
// temporary folder alone, and logs nothing.
func (s surroundings) validate(t *testing.T, config string) {
	t.Helper()
	cfg := caddy.Config{Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{"default": {}}}}
	if err := caddy.StrictUnmarshalJSON(caddy.RemoveMetaFields([]byte(config)), &cfg); err != nil {
		t.Fatal(err)
	}
	cfg.StorageRaw = fmt.Appendf(nil, `{"module":"file_system","root":%q}`, string(s)+"/storage")
	for _, log := range cfg.Logging.Logs {
		log.WriterRaw = json.RawMessage(`{"output":"discard"}`)
	}
	if err := caddy.Validate(&cfg); err != nil {
		t.Errorf("%v in:\n%s", err, config)
	}
}

// TestEachPromiseOfSecurityNamesItsTests keeps the promises of SECURITY.md tied
// to tests: each row of their table names at least one, and each name in the
// page is that of a test. So it is with what we rely on in Caddy.
func TestEachPromiseOfSecurityNamesItsTests(t *testing.T) {
	tests, name := testNames(t), regexp.MustCompile("`((?:Test|Fuzz)\\w+)`")
	for page, header := range map[string]string{"SECURITY.md": "| promise | test |", "CONTRIBUTING.md": "| in Caddy, or net/http | test |"} {
		text := string(lbtest.ReadFile(t, page))
		for _, match := range name.FindAllStringSubmatch(text, -1) {
			if !slices.Contains(tests, match[1]) {
				t.Errorf("%s names %s, and there is no such test", page, match[1])
			}
		}
		_, table, _ := strings.Cut(text, header+"\n|---|---|\n")
		table, _, _ = strings.Cut(table, "\n\n")
		if strings.Count(table, "\n") < 20 {
			t.Errorf("found %q in %s, expected many more rows", table, page)
		}
		for row := range strings.Lines(table) {
			if cells := strings.Split(row, "|"); len(cells) < 3 || !name.MatchString(cells[len(cells)-2]) {
				t.Errorf("%s names no test in: %s", page, row)
			}
		}
	}
}

// testNames are those of all tests of the repository.
func testNames(t *testing.T) (names []string) {
	t.Helper()
	test := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range test.FindAllSubmatch(text, -1) {
			names = append(names, string(match[1]))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// TestContributingHasALineForEachFileAndFolder so that a newcomer knows what is in it without
// opening it.
func TestContributingHasALineForEachFileAndFolder(t *testing.T) {
	text := lbtest.ReadFile(t, "CONTRIBUTING.md")
	for _, pattern := range []string{"*.go", "internal/*/"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if base := filepath.Base(name); !strings.HasSuffix(base, "_test.go") && !regexp.MustCompile("(?m)^\\|[^|]*`"+regexp.QuoteMeta(base)+"`").Match(text) {
				t.Errorf("no table of CONTRIBUTING.md has a line for %s", name)
			}
		}
	}
}

// TestEachOptionIsSetSomewhere holds the rule of CONTRIBUTING.md: an option that no example sets, and no page's task needs, is
// not added. The page of the options does not count: it has them all.
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
	options := 0
	for file, blocks := range map[string][]string{
		"caddyfile.go": {"openai_lb"}, "internal/attempt/health.go": {"openai_lb"}, "internal/attempt/options.go": {"openai_lb"},
		"internal/backend/caddyfile.go": {"backend"}, "internal/affinity/options.go": {"affinity"}, "internal/callers/caddyfile.go": {"openai_lb", "caller", "tier"},
	} {
		for _, option := range optionsIn(t, file) {
			options++
			if !slices.ContainsFunc(blocks, func(block string) bool { return set[block+" "+option] }) {
				t.Errorf("no example sets %s of %s", option, blocks)
			}
		}
	}
	if options < 40 {
		t.Errorf("found only %d options", options)
	}
}

// findSet adds the options that a Caddyfile sets, after the names of the blocks that they are in.
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

// TestThePackageCommentHasTheWordsOfTheGlossary compares them without the links, which only the page has.
func TestThePackageCommentHasTheWordsOfTheGlossary(t *testing.T) {
	comment, _, _ := strings.Cut(string(lbtest.ReadFile(t, "module.go")), "\npackage ")
	_, list, _ := strings.Cut(comment, "as docs/glossary.md has them:\n//\n")
	entries := strings.Split(strings.ReplaceAll(list, "\n//     ", " "), "//   - ")[1:]
	if len(entries) != 15 {
		t.Errorf("there are %d words, want 15", len(entries))
	}
	text := strings.Join(strings.Fields(string(lbtest.ReadFile(t, "docs/glossary.md"))), " ")
	for _, entry := range entries {
		word, meaning, _ := strings.Cut(strings.TrimSpace(entry), ": ")
		if !strings.Contains(text, "**"+word+"**: "+meaning) {
			t.Errorf("the glossary does not say of %s: %s", word, meaning)
		}
	}
}
