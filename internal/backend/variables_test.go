package backend

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestTheEnvironmentDescribesBackends(t *testing.T) {
	one := []string{"BACKEND_1_URL=https://a.openai.azure.com", "BACKEND_1_PRIORITY=1", "BACKEND_1_APIKEY=key"}
	const wantOne = "https://a.openai.azure.com 1 BACKEND_1_APIKEY"
	for _, c := range []struct {
		name   string
		prefix string
		env    []string
		want   []string
	}{
		{"nothing", "BACKEND", nil, nil},
		{"one", "BACKEND", one, []string{wantOne}},
		{"white space around values", "BACKEND", []string{"BACKEND_1_URL= https://a.example/\t\n", "BACKEND_1_PRIORITY= 7 ", "BACKEND_1_APIKEY=key\r\n", "BACKEND_1_DEPLOYMENT_NAME= gpt-4o \n"},
			[]string{"https://a.example/ 7 BACKEND_1_APIKEY gpt-4o"}},
		{"no key, and a blank one", "BACKEND", []string{"BACKEND_1_URL=https://a", "BACKEND_1_PRIORITY=1", "BACKEND_2_URL=https://b", "BACKEND_2_PRIORITY=2", "BACKEND_2_APIKEY= "},
			[]string{"https://a 1", "https://b 2"}},
		{"a blank deployment", "BACKEND", append([]string{"BACKEND_1_DEPLOYMENT_NAME= "}, one...), []string{wantOne}},
		{"numbers by their value, then words", "BACKEND",
			[]string{"BACKEND_10_URL=http://ten", "BACKEND_10_PRIORITY=1", "BACKEND_WEST_URL=http://west", "BACKEND_WEST_PRIORITY=1", "BACKEND_2_URL=http://two", "BACKEND_2_PRIORITY=1",
				"BACKEND_007_URL=http://seven", "BACKEND_007_PRIORITY=1", "BACKEND_0_URL=http://zero", "BACKEND_0_PRIORITY=1", "BACKEND_EAST1_URL=http://east", "BACKEND_EAST1_PRIORITY=1"},
			[]string{"http://zero 1", "http://two 1", "http://seven 1", "http://ten 1", "http://east 1", "http://west 1"}},
		{"names in another case", "BACKEND", []string{"backend_1_url=https://a", "Backend_1_Priority=3", "backend_1_ApiKey=key"},
			[]string{"https://a 3 backend_1_ApiKey"}},
		{"names that differ in case alone", "BACKEND", append([]string{"backend_1_url=https://other", "backend_1_apikey=other"}, one...), []string{wantOne}},
		{"another prefix", "TEAM_A", append([]string{"TEAM_A_1_URL=https://t", "TEAM_A_1_PRIORITY=1", "TEAM_B_1_URL=https://b"}, one...),
			[]string{"https://t 1"}},
		{"a longer prefix beside it", "BACKEND", append([]string{"BACKEND_EU_1_URL=https://t", "BACKEND_EU_1_PRIORITY=1"}, one...), []string{wantOne}},
		{"the variables of a Kubernetes service called backend", "BACKEND", append([]string{"BACKEND_SERVICE_HOST=10.0.0.1", "BACKEND_SERVICE_PORT=8080", "BACKEND_SERVICE_PORT_URL=8081", "BACKEND_PORT=tcp://10.0.0.1:8080",
			"BACKEND_PORT_8080_TCP=tcp://10.0.0.1:8080", "BACKEND_PORT_8080_TCP_PROTO=tcp", "BACKEND_PORT_8080_TCP_PORT=8080", "BACKEND_PORT_8080_TCP_ADDR=10.0.0.1"}, one...), []string{wantOne}},
		{"the variables of Kubernetes services called backend-1 and backend-db", "BACKEND", append([]string{"BACKEND_1_SERVICE_HOST=10.0.0.1", "BACKEND_1_PORT=tcp://10.0.0.1:80", "BACKEND_DB_SERVICE_HOST=10.0.0.2",
			"BACKEND_DB_PORT_5432_TCP_ADDR=10.0.0.2"}, one...), []string{wantOne}},
	} {
		t.Run(c.name, func(t *testing.T) {
			backends, err := parseEnvironment(c.env).backends(c.prefix)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, b := range backends {
				key := ""
				if b.APIKey.Value != "" {
					key = b.APIKey.Name
				}
				got = append(got, strings.Join(strings.Fields(fmt.Sprint(b.URL.Value, " ", b.Priority, " ", key, " ", b.Deployment)), " "))
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got  %q\nwant %q", got, c.want)
			}
		})
	}
}

func TestAWrongVariableIsRefusedByNameAndValue(t *testing.T) {
	for _, c := range []struct{ env, want string }{
		{"BACKEND_2_PRIORITY=1", "BACKEND_2_URL is required"},
		{"BACKEND_2_URL=https://a", "BACKEND_2_PRIORITY is required"},
		{"BACKEND_2_URL=https://a backend_2_priority=0", "backend_2_priority '0' is not a whole number of 1 or more"},
		{"BACKEND_2_URL=https://a BACKEND_2_PRIORITY=1.5", "BACKEND_2_PRIORITY '1.5' is not"},
		{"BACKEND_2_URL=https://a BACKEND_2_PRIORITY=2147483648", "BACKEND_2_PRIORITY '2147483648' is not"},
	} {
		if _, err := parseEnvironment(strings.Fields(c.env)).backends("BACKEND"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s gives %v, want %s", c.env, err, c.want)
		}
	}
	for _, prefix := range []string{"", "1", "1-2", "BACKEND_", "_", "A B", "Ä"} {
		if err := CheckPrefix(prefix); err == nil || !strings.Contains(err.Error(), "'"+prefix+"'") {
			t.Errorf("the prefix %q gives %v", prefix, err)
		}
	}
	for _, prefix := range []string{DefaultPrefix, "a", "TEAM_A", "x1"} {
		if err := CheckPrefix(prefix); err != nil {
			t.Errorf("the prefix %q gives %v", prefix, err)
		}
	}
}

func TestTheTimeoutIsTheSamples(t *testing.T) {
	for value, want := range map[string]time.Duration{"": 100 * time.Second, " ": 100 * time.Second, " 30 ": 30 * time.Second, "0": 0, "100s": 0} {
		got, err := parseEnvironment([]string{"HTTP_TIMEOUT_SECONDS=" + value}).timeout()
		if (err == nil) != (want > 0) || err == nil && got != want {
			t.Errorf("%q gives %s, %v, want %s", value, got, err, want)
		}
	}
	if got, err := parseEnvironment(nil).timeout(); got != 100*time.Second || err != nil {
		t.Errorf("without a variable: %s, %v", got, err)
	}
}

func TestABackendOfTheEnvironmentIsAzures(t *testing.T) {
	t.Setenv("BACKEND_1_APIKEY", "key")
	b, err := fromVariables(described{
		URL:    variable{Name: "BACKEND_1_URL", Value: "https://a/{env.HOME}"},
		APIKey: variable{Name: "BACKEND_1_APIKEY", Value: "key"}, Priority: 7, Deployment: "gpt-4o",
	})
	if err != nil {
		t.Fatal(err)
	}
	// the braces of a variable's value are no placeholder
	if got := fmt.Sprint(b.URL, b.Priority, b.Auth, b.APIKey, b.Deployment); got != "https://a/%7Benv.HOME%7D7api_key{env.BACKEND_1_APIKEY}gpt-4o" {
		t.Errorf("got %s", got)
	}
}
