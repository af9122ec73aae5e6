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
				if config := wholeJSON(t, b.text); config != nil {
					surroundings.validate(t, surroundings.fill(string(config)))
				}
			}
		})
	}
	if caddyfiles < 10 {
		t.Errorf("found %d blocks marked as caddyfile in the docs, expected many more", caddyfiles)
	}
}

// TestCellsOfTablesInTheDocsAreShort keeps tables readable.
func TestCellsOfTablesInTheDocsAreShort(t *testing.T) {
	const longest = 25
	pages, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(pages, "README.md") {
		text := lbtest.ReadFile(t, file)
		for i, line := range strings.Split(string(text), "\n") {
			if !strings.HasPrefix(line, "|") {
				continue
			}
			for _, cell := range strings.Split(strings.ReplaceAll(line, `\|`, " "), "|") {
				if words := len(strings.Fields(cell)); words > longest {
					t.Errorf("%s:%d: a cell of %d words, expected %d at most: %s", file, i+1, words, longest, cell)
				}
			}
		}
	}
}

// TestEachPageLeadsToTheGlossary is about those of the user's pages that use its terms.
func TestEachPageLeadsToTheGlossary(t *testing.T) {
	pages, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, "README.md") {
		if page != "docs/glossary.md" && page != "docs/index.md" && !strings.Contains(readPage(t, page), "glossary.md)") {
			t.Errorf("%s has no link to the glossary", page)
		}
	}
}

// TestNoPageIsLong keeps each page to one reader, and all pages to what a reader has the time for.
func TestNoPageIsLong(t *testing.T) {
	limits := map[string]int{"README.md": 1000, "CONTRIBUTING.md": 1600, "SECURITY.md": 2000, "bench/README.md": 2500, "charts/caddy-openai-lb/README.md": 400}
	pages, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		limits[page] = 3200
	}
	const most = 27000
	all := 0
	for page, limit := range limits {
		words := len(strings.Fields(readPage(t, page)))
		if words > limit {
			t.Errorf("%s has %d words, expected %d at most", page, words, limit)
		}
		if strings.HasPrefix(page, "docs/") {
			all += words
		}
	}
	if all > most {
		t.Errorf("the pages in docs have %d words, expected %d at most", all, most)
	}
}

// TestTheREADMEBeginsWithTwoCommands checks that a stranger finds how to run it and how to
// test it before how to install it.
func TestTheREADMEBeginsWithTwoCommands(t *testing.T) {
	first, _, _ := strings.Cut(string(lbtest.ReadFile(t, "README.md")), "## Install")
	for _, command := range []string{"go run ./cmd/caddy run --config examples/quickstart/Caddyfile", "go test ./..."} {
		if !strings.Contains(first, "\n"+command+"\n```") {
			t.Errorf("README.md does not begin with the command %s", command)
		}
	}
}

// TestLinksInTheDocsLeadSomewhere checks the links between files, and to the
// headings of pages.
func TestLinksInTheDocsLeadSomewhere(t *testing.T) {
	block := regexp.MustCompile("(?ms)^[ \t]*```.*?^[ \t]*```$")
	link := regexp.MustCompile(`\]\(([^)\s#]*)(?:#([^)\s]+))?\)`)
	texts := make(map[string]string)
	for _, pattern := range []string{"*.md", "*/*.md", "examples/*/*.md", "charts/*/*.md", "bench/results/*.md"} {
		files, _ := filepath.Glob(pattern)
		for _, file := range files {
			text := lbtest.ReadFile(t, file)
			texts[file] = block.ReplaceAllString(string(text), "")
		}
	}
	links := 0
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
func docsBlocks(t *testing.T) []docsBlock {
	t.Helper()
	var blocks []docsBlock
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no pages in %s: %v", pattern, err)
		}
		for _, file := range files {
			text := lbtest.ReadFile(t, file)
			blocks = append(blocks, fencedBlocks(file, string(text))...)
		}
	}
	return blocks
}

func fencedBlocks(file, text string) []docsBlock {
	var blocks []docsBlock
	var b *docsBlock
	indent := ""
	for i, line := range strings.SplitAfter(text, "\n") {
		fence := strings.TrimSpace(line)
		switch {
		case b == nil && strings.HasPrefix(fence, "```"):
			indent, _, _ = strings.Cut(line, "`")
			b = &docsBlock{where: fmt.Sprintf("%s:%d", file, i+1), language: strings.TrimPrefix(fence, "```")}
		case b != nil && fence == "```":
			blocks = append(blocks, *b)
			b = nil
		case b != nil:
			b.text += strings.TrimPrefix(line, indent)
		}
	}
	return blocks
}

// adaptBlock makes a block of a page a whole Caddyfile, and that JSON.
func adaptBlock(t *testing.T, text string) string {
	t.Helper()
	const backend = "backend http://backend.example"
	word := firstWord(text)
	switch {
	case slices.Contains(optionsIn(t, "internal/backend/caddyfile.go"), word):
		text = ":8080 {\nopenai_lb {\n" + backend + " {\n" + text + "}\n}\n}\n"
	case word == "backend", word == "backends_from_env", slices.Contains(optionsIn(t, handlerFiles...), word) && !slices.Contains([]string{"reverse_proxy", "http", "upstream"}, word):
		if !strings.Contains(text, "backend ") && word != "backends_from_env" {
			text = backend + "\n" + text
		}
		text = ":8080 {\nopenai_lb {\n" + text + "}\n}\n"
	case regexp.MustCompile(`^(openai_lb|reverse_proxy|log_append|log|header|handle|handle_errors|request_body|@\w+)$`).MatchString(word):
		text = ":8080 {\n" + text + "}\n"
	}
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	return string(config)
}

// firstWord is the first of a Caddyfile that is no comment.
func firstWord(text string) string {
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 0 && !strings.HasPrefix(fields[0], "#") {
			return fields[0]
		}
	}
	return ""
}

// handlerFiles are those that read the options of openai_lb.
var handlerFiles = []string{"caddyfile.go", "internal/attempt/health.go", "internal/attempt/options.go"}

// optionsIn are the options that a file reads from a Caddyfile.
func optionsIn(t *testing.T, files ...string) (options []string) {
	t.Helper()
	for _, file := range files {
		for _, option := range regexp.MustCompile(`(?m)^\t+"(\w+)": +(?:directive|pools|backend|c)\b`).FindAllSubmatch(lbtest.ReadFile(t, file), -1) {
			options = append(options, string(option[1]))
		}
	}
	return options
}

// wholeJSON makes a JSON block a whole configuration. Lines of a log are none.
func wholeJSON(t *testing.T, text string) []byte {
	t.Helper()
	var fields map[string]json.RawMessage
	decoder := json.NewDecoder(strings.NewReader(text))
	for decoder.More() {
		if err := decoder.Decode(&fields); err != nil {
			t.Fatal(err)
		}
	}
	switch {
	case fields["apps"] != nil:
		return []byte(text)
	case fields["handler"] != nil:
		return fmt.Appendf(nil, `{"apps":{"http":{"servers":{"docs":{"listen":[":8080"],"routes":[{"handle":[%s]}]}}}}}`, text)
	}
	return nil
}

// surroundings are what the configurations of the docs expect of a machine:
// variables, files, and a place for what Caddy stores.
type surroundings struct{ storage, secret, clientKeys, ca string }

func newSurroundings(t *testing.T) surroundings {
	t.Helper()
	folder := t.TempDir()
	s := surroundings{
		storage:    filepath.Join(folder, "storage"),
		secret:     filepath.Join(folder, "secret"),
		clientKeys: filepath.Join(folder, "client-keys"),
		ca:         filepath.Join(folder, "ca.pem"),
	}
	certificate, err := lbtest.NewCertificate(time.Now().Add(time.Hour), "ca.example.com")
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string][]byte{
		s.secret:     []byte("key-of-a-file\n"),
		s.clientKeys: []byte("dave client-key-of-dave\n"),
		s.ca:         pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Certificate[0]}),
	} {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("BACKEND_1_URL", "https://contoso.openai.azure.com")
	t.Setenv("BACKEND_1_PRIORITY", "1")
	t.Setenv("BACKEND_1_APIKEY", "key-of-backend-1")
	return s
}

var (
	envPlaceholder  = regexp.MustCompile(`\{env\.(\w+)\}`)
	filePlaceholder = regexp.MustCompile(`\{file\.[^}]+\}`)
	stateBlock      = regexp.MustCompile(`(?ms)^\s*state redis \{.*?^\s*\}$`)
	clientKeysPath  = regexp.MustCompile(`(client_keys_file"?:? *"?)/[^\s"]+`)
)

// fill puts into a configuration what is there on the machine that it is for.
func (s surroundings) fill(config string) string {
	config = envPlaceholder.ReplaceAllString(config, "value-of-$1")
	config = filePlaceholder.ReplaceAllLiteralString(config, "{file."+s.secret+"}")
	config = strings.ReplaceAll(config, "/etc/ssl/private-ca.pem", s.ca)
	config = clientKeysPath.ReplaceAllString(config, "${1}"+s.clientKeys)
	// modules of their own, which their own tests load
	config = stateBlock.ReplaceAllString(config, "")
	return strings.ReplaceAll(config, "auth azure_identity", "auth none")
}

// validate loads a configuration without starting it. It writes to the
// temporary folder alone, and logs nothing.
func (s surroundings) validate(t *testing.T, config string) {
	t.Helper()
	var whole map[string]any
	if err := json.Unmarshal([]byte(config), &whole); err != nil {
		t.Fatal(err)
	}
	whole["storage"] = map[string]any{"module": "file_system", "root": s.storage}
	logging, _ := whole["logging"].(map[string]any)
	logs, _ := logging["logs"].(map[string]any)
	if logs == nil {
		logs = make(map[string]any)
	}
	if logs["default"] == nil {
		logs["default"] = make(map[string]any)
	}
	for _, log := range logs {
		log.(map[string]any)["writer"] = map[string]any{"output": "discard"}
	}
	whole["logging"] = map[string]any{"logs": logs}
	text, err := json.Marshal(whole)
	if err != nil {
		t.Fatal(err)
	}
	var cfg caddy.Config
	if err := caddy.StrictUnmarshalJSON(caddy.RemoveMetaFields(text), &cfg); err != nil {
		t.Fatal(err)
	}
	if err := caddy.Validate(&cfg); err != nil {
		t.Errorf("%v in:\n%s", err, config)
	}
}

// TestEachPromiseOfSecurityNamesItsTests keeps the promises of SECURITY.md tied
// to tests: each row of their table names at least one, and each name in the
// page is that of a test. So it is with what we rely on in Caddy.
func TestEachPromiseOfSecurityNamesItsTests(t *testing.T) {
	tests := testNames(t)
	for _, c := range []struct {
		page, header string
		rows         int
	}{
		{"SECURITY.md", "| promise | test |\n|---|---|\n", 20},
		{"CONTRIBUTING.md", "| in Caddy, or net/http | test |\n|---|---|\n", 20},
	} {
		text := lbtest.ReadFile(t, c.page)
		name := regexp.MustCompile("`((?:Test|Fuzz)\\w+)`")
		for _, match := range name.FindAllStringSubmatch(string(text), -1) {
			if !slices.Contains(tests, match[1]) {
				t.Errorf("%s names %s, and there is no such test", c.page, match[1])
			}
		}
		_, table, _ := strings.Cut(string(text), c.header)
		rows := 0
		for line := range strings.Lines(table) {
			if !strings.HasPrefix(line, "|") {
				break
			}
			rows++
			if cells := strings.Split(strings.TrimRight(line, "| \n"), "|"); len(cells) < 3 || !name.MatchString(cells[len(cells)-1]) {
				t.Errorf("%s names no test in: %s", c.page, line)
			}
		}
		if rows < c.rows {
			t.Errorf("found %d rows in %s, expected many more", rows, c.page)
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
	text, err := os.ReadFile("CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
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
	for _, pattern := range []string{"examples/*Caddyfile", "examples/*/*Caddyfile"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			findSet(set, string(lbtest.ReadFile(t, file)), "")
		}
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
	source, err := os.ReadFile("module.go")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("docs/glossary.md")
	if err != nil {
		t.Fatal(err)
	}
	comment, _, _ := strings.Cut(string(source), "\npackage ")
	_, list, _ := strings.Cut(comment, "as docs/glossary.md has them:\n//\n")
	entries := strings.Split(strings.ReplaceAll(list, "\n//     ", " "), "//   - ")[1:]
	if len(entries) != 15 {
		t.Errorf("there are %d words, want 15", len(entries))
	}
	text := strings.Join(strings.Fields(string(page)), " ")
	for _, entry := range entries {
		word, meaning, _ := strings.Cut(strings.TrimSpace(entry), ": ")
		if !strings.Contains(text, "**"+word+"**: "+meaning) {
			t.Errorf("the glossary does not say of %s: %s", word, meaning)
		}
	}
}

func readPage(t *testing.T, page string) string {
	t.Helper()
	return string(lbtest.ReadFile(t, page))
}
