package e2e

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"
)

const kubernetes = "../examples/kubernetes"

// kustomization is what kustomization.yaml uses of its format.
type kustomization struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Images     []struct {
		Name    string `json:"name"`
		NewName string `json:"newName"`
		NewTag  string `json:"newTag"`
	} `json:"images"`
	Resources          []string `json:"resources"`
	ConfigMapGenerator []struct {
		Name  string   `json:"name"`
		Files []string `json:"files"`
	} `json:"configMapGenerator"`
}

// serviceMonitor is what servicemonitor.yaml uses of its format.
type serviceMonitor struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   map[string]any `json:"metadata"`
	Spec       struct {
		JobLabel string `json:"jobLabel"`
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		Endpoints []struct {
			Port     string `json:"port"`
			Path     string `json:"path"`
			Interval string `json:"interval"`
		} `json:"endpoints"`
	} `json:"spec"`
}

// manifests are those of the example, as the API of Kubernetes reads them.
type manifests struct {
	kustomization kustomization
	deployment    appsv1.Deployment
	services      [2]corev1.Service
	budget        policyv1.PodDisruptionBudget
	policy        networkingv1.NetworkPolicy
	monitor       serviceMonitor
	secret        corev1.Secret
}

// readManifests refuses a field that a kind does not have.
func readManifests(t *testing.T) *manifests {
	t.Helper()
	m := &manifests{}
	read := map[string]bool{"kustomization.yaml": true}
	for file, objects := range map[string][]any{
		"kustomization.yaml":  {&m.kustomization},
		"deployment.yaml":     {&m.deployment},
		"service.yaml":        {&m.services[0], &m.services[1]},
		"pdb.yaml":            {&m.budget},
		"networkpolicy.yaml":  {&m.policy},
		"servicemonitor.yaml": {&m.monitor},
		"secret.example.yaml": {&m.secret},
	} {
		read[file] = true
		documents := strings.Split(string(readFile(t, filepath.Join(kubernetes, file))), "\n---\n")
		if len(documents) != len(objects) {
			t.Fatalf("%s has %d documents, expected %d", file, len(documents), len(objects))
		}
		for i, document := range documents {
			if err := yaml.UnmarshalStrict([]byte(document), objects[i]); err != nil {
				t.Errorf("%s: %v", file, err)
			}
			if kind := reflect.TypeOf(objects[i]).Elem().Name(); !strings.Contains(document, "\nkind: ") && kind != "" {
				t.Errorf("%s: %s has no kind", file, kind)
			}
		}
	}
	files, err := filepath.Glob(kubernetes + "/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if !read[filepath.Base(file)] {
			t.Errorf("nobody checks %s", file)
		}
	}
	return m
}

func TestTheManifestsForKubernetesFitTogether(t *testing.T) {
	t.Parallel()
	m := readManifests(t)
	pod := m.deployment.Spec.Template
	container := pod.Spec.Containers[0]
	ports := make(map[string]int32)
	for _, port := range container.Ports {
		ports[port.Name] = port.ContainerPort
	}
	for name, selector := range map[string]map[string]string{
		"the Deployment":             m.deployment.Spec.Selector.MatchLabels,
		"the first Service":          m.services[0].Spec.Selector,
		"the second Service":         m.services[1].Spec.Selector,
		"the PodDisruptionBudget":    m.budget.Spec.Selector.MatchLabels,
		"the NetworkPolicy":          m.policy.Spec.PodSelector.MatchLabels,
		"the first spread of pods":   pod.Spec.TopologySpreadConstraints[0].LabelSelector.MatchLabels,
		"the second spread of pods":  pod.Spec.TopologySpreadConstraints[1].LabelSelector.MatchLabels,
		"the pod's own, as a sample": pod.Labels,
	} {
		if !reflect.DeepEqual(selector, pod.Labels) {
			t.Errorf("%s selects %v, pods are %v", name, selector, pod.Labels)
		}
	}
	named := []intstr.IntOrString{container.StartupProbe.HTTPGet.Port, container.LivenessProbe.HTTPGet.Port, container.ReadinessProbe.HTTPGet.Port}
	for _, service := range m.services {
		named = append(named, service.Spec.Ports[0].TargetPort)
	}
	for _, rule := range m.policy.Spec.Ingress {
		named = append(named, *rule.Ports[0].Port)
	}
	for _, port := range named {
		if ports[port.StrVal] == 0 {
			t.Errorf("no port of the container is called %s", port.String())
		}
	}
	ops := m.services[1]
	for label, value := range m.monitor.Spec.Selector.MatchLabels {
		if ops.Labels[label] != value {
			t.Errorf("the ServiceMonitor wants %s=%s, the Service has %q", label, value, ops.Labels[label])
		}
	}
	if got := m.monitor.Spec.Endpoints[0].Port; got != ops.Spec.Ports[0].Name {
		t.Errorf("the ServiceMonitor asks at %s, the Service has %s", got, ops.Spec.Ports[0].Name)
	}
	// the alert that Caddy is down asks for it
	if job := ops.Labels[m.monitor.Spec.JobLabel]; !strings.Contains(string(readFile(t, alerts)), `up{job="`+job+`"}`) {
		t.Errorf("no alert asks for the job %q", job)
	}
	generated := m.kustomization.ConfigMapGenerator[0]
	if !slices.Equal(generated.Files, []string{"Caddyfile"}) || pod.Spec.Volumes[0].ConfigMap.Name != generated.Name {
		t.Errorf("the Deployment mounts %s, the ConfigMap is %+v", pod.Spec.Volumes[0].ConfigMap.Name, generated)
	}
	if pod.Spec.Volumes[1].Secret.SecretName != m.secret.Name {
		t.Errorf("the Deployment mounts %s, the Secret is %s", pod.Spec.Volumes[1].Secret.SecretName, m.secret.Name)
	}
	if image := m.kustomization.Images[0].Name; container.Image != image {
		t.Errorf("the Deployment runs %s, kustomization.yaml renames %s", container.Image, image)
	}
	for _, file := range m.kustomization.Resources {
		readFile(t, filepath.Join(kubernetes, file))
	}
	security := container.SecurityContext
	if !*pod.Spec.SecurityContext.RunAsNonRoot || !*security.ReadOnlyRootFilesystem || *security.AllowPrivilegeEscalation ||
		!slices.Equal(security.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("the container may do more than it needs: %+v", security)
	}
}

func TestTheCaddyfileForKubernetesFitsItsManifests(t *testing.T) {
	t.Parallel()
	m := readManifests(t)
	config := string(readFile(t, kubernetes+"/Caddyfile"))
	container := m.deployment.Spec.Template.Spec.Containers[0]
	for _, mount := range container.VolumeMounts {
		if mount.Name == "keys" || mount.Name == "tls" {
			if !strings.Contains(config, mount.MountPath+"/") {
				t.Errorf("the Caddyfile has no use for %s", mount.MountPath)
			}
		}
	}
	used := regexp.MustCompile(`/run/secrets/openai-lb/([\w-]+)`).FindAllStringSubmatch(config, -1)
	if len(used) != len(m.secret.StringData) {
		t.Errorf("the Caddyfile reads %d files of the Secret, which has %d", len(used), len(m.secret.StringData))
	}
	for _, file := range used {
		if m.secret.StringData[file[1]] == "" {
			t.Errorf("the Secret has no %s", file[1])
		}
	}

	var apps struct {
		Apps struct {
			HTTP struct {
				ShutdownDelay time.Duration `json:"shutdown_delay"`
				GracePeriod   time.Duration `json:"grace_period"`
			} `json:"http"`
		} `json:"apps"`
	}
	adapted, err := exec.Command(caddy, "adapt", "--config", kubernetes+"/Caddyfile").Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(bytes.NewReader(adapted)).Decode(&apps); err != nil {
		t.Fatal(err)
	}
	delay, grace := apps.Apps.HTTP.ShutdownDelay, apps.Apps.HTTP.GracePeriod
	patience := time.Duration(*m.deployment.Spec.Template.Spec.TerminationGracePeriodSeconds) * time.Second
	if delay <= 0 || grace <= 0 || patience <= delay+grace {
		t.Errorf("Kubernetes kills after %v, Caddy takes %v and %v", patience, delay, grace)
	}
	readiness := container.ReadinessProbe
	if noticed := time.Duration(readiness.PeriodSeconds*readiness.FailureThreshold) * time.Second; delay <= noticed {
		t.Errorf("a stop is noticed after %v, and the port closes after %v", noticed, delay)
	}
}
