package redis

import (
	"bytes"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// command runs `caddy openai-lb` with the admin API of a replica, and returns
// its output with single spaces.
func (r *replica) command(args ...string) string {
	r.t.Helper()
	out, _ := r.order(strings.Join(args, " ")) // it prints what is wrong
	var lines []string
	for line := range strings.Lines(out) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return strings.Join(lines, "\n")
}

func (r *replica) wantCommand(command string, texts ...string) {
	r.t.Helper()
	var got, lacks string
	deadline := time.Now().Add(2 * time.Minute)
	for again := true; again; again = lacks != "" && time.Now().Before(deadline) {
		got, lacks = r.command(strings.Fields(command)...), ""
		for _, text := range texts {
			if !strings.Contains(got, text) {
				lacks = text
			}
		}
		if lacks != "" {
			time.Sleep(50 * time.Millisecond)
		}
	}
	if lacks != "" {
		r.t.Errorf("%s lacks %q:\n%s", command, lacks, got)
	}
}

// TestAnOperatorSeesAllReplicasAtOnce at any of three, whose storages are
// apart, at one that has just started, and, without Redis, one alone.
func TestAnOperatorSeesAllReplicasAtOnce(t *testing.T) {
	s := startServer(t)
	file := filepath.Join(t.TempDir(), "keys")
	lbtest.WriteFile(t, file, "team "+teamKey+" tier=bronze\nother "+otherKey+"\n")
	options := newAccount(t).backends(1) + "client_keys_file " + file + "\ntier gold default {\nrequests 40/month\nmax_requests 9\n}\ntier bronze {\nrequests 6/month\nmodels r0\n}\n" + s.option()
	all := startReplicas(t, 3, options)
	inTouch(t, all)
	all[1].ask(teamKey, "none")
	for i, r := range all {
		for range i + 1 {
			if status := r.ask(teamKey, "r0"); status != 200 {
				t.Fatalf("got %d", status)
			}
		}
	}
	for _, r := range all {
		r.wantCommand("callers", " 6 (100%) ") // the others know what was used
		if status := r.ask(teamKey, "r0"); status != 429 {
			t.Errorf("got %d over the limit", status)
		}
	}
	late := startReplica(t, options)
	everyone := append(all, late)
	inTouch(t, everyone)
	for _, r := range everyone {
		r.wantCommand("status", " 0 6 0\n", "replicas: ", "(asked)")
		r.wantCommand("callers", " team bronze 6 requests/month 6 (100%) ")
		r.wantCommand("callers --json", `"model":1`, `"requests/month":`, `"last_hour":{"requests":6,`)
		r.wantCommand("usage --by caller --format csv", "\nteam,6,")
		if got := r.command("status"); strings.Contains(got, "no answer") {
			t.Errorf("somebody does not answer:\n%s", got)
		}
	}
	// one of them
	list := late.command("replicas", "--json")
	_, id, _ := strings.Cut(list, `"id":"`) // the oldest one
	late.wantCommand("status --replica "+id[:12], " 0 1 0\n", "replicas: ")
	late.wantCommand("usage --by caller --format csv --replica "+id[:12], "\nteam,1,")
	late.wantCommand("callers --json --replica "+id[:12], `"last_hour":{"requests":1,`)
	late.wantCommand("status --replica nobody", "no replica is called 'nobody'")
	for _, key := range s.do("keys", "*").([]any) {
		if text := fmt.Sprint(key, s.do("type", key)); s.do("type", key) == "hash" {
			for _, secret := range []string{"team", "bronze", teamKey, "spare", "s3cret"} {
				if text += fmt.Sprint(s.do("hgetall", key)); strings.Contains(text, secret) {
					t.Errorf("Redis has %s in %s", secret, text)
				}
			}
		}
	}
	s.kill()
	for i, r := range all {
		r.wantCommand("status", fmt.Sprintf(" 0 %d 0\n", i+1), "not connected to other replicas", "no answer, last heard")
		r.wantCommand("usage --by caller --format csv", fmt.Sprintf("\nteam,%d,", i+1), "not connected")
		r.wantCommand("status --replica "+id[:12], map[bool]string{true: " 0 1 0\n", false: "has not answered"}[i == 0])
	}
	s.start()
	for _, r := range all {
		r.wantCommand("status", " 0 6 0\n")
	}
}

// TestAnOrderNamesTheReplicasThatDidNotHearOfIt and the command fails: without
// Redis, other replicas still use the backend.
func TestAnOrderNamesTheReplicasThatDidNotHearOfIt(t *testing.T) {
	s := startServer(t)
	all := startReplicas(t, 2, newAccount(t).backends(1)+s.option())
	inTouch(t, all)
	for _, order := range []string{"drain r0 --wait", "resume r0"} {
		if text, err := all[0].order(order); err != nil || strings.Contains(text, " at 1 of ") {
			t.Errorf("%s: %v\n%s", order, err, text)
		}
	}
	s.kill()
	for _, order := range []string{"drain r0 --wait", "drain r0", "resume r0"} {
		text, err := all[0].order(order)
		if err == nil || !strings.Contains(err.Error(), "but not at every replica: ") || !strings.Contains(err.Error(), "last heard") {
			t.Errorf("%s: %v\n%s", order, err, text)
		}
	}
	if text, err := all[0].order("drain r0"); err == nil {
		t.Errorf("the order has missed nobody:\n%s", text)
	}
	s.start()
	inTouch(t, all)
	lbtest.WaitFor(t, func() bool { _, err := all[1].order("drain r0 --wait"); return err == nil })
}

// order gives an order with the admin API of a replica, and returns the output
// and the error of the command.
func (r *replica) order(args string) (text string, err error) {
	var out bytes.Buffer
	command := cobra.Command{SilenceUsage: true}
	caddycmd.Commands()["openai-lb"].CobraFunc(&command)
	command.SetOut(&out)
	command.SetErr(&out)
	command.SetArgs(append(strings.Fields(args), "--address", r.admin))
	err = command.Execute()
	return out.String(), err
}
