package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestAnArchiveFollowsFromItsFiles also if they come in another order. Whoever
// builds it, and when, leaves no trace.
func TestAnArchiveFollowsFromItsFiles(t *testing.T) {
	at := time.Unix(1_790_000_000, 0).UTC()
	files := []file{{"caddy", 0o755, []byte("program")}, {"LICENSE", 0o644, []byte("terms")}, {strings.Repeat("long/", 40) + "LICENSE", 0o644, nil}}
	for name, write := range map[string]func(io.Writer, string, []file, time.Time) error{"tar": writeTar, "zip": writeZip} {
		var first, second bytes.Buffer
		err := write(&first, "folder", files, at)
		slices.Reverse(files)
		err = errors.Join(err, write(&second, "folder", files, at.In(time.FixedZone("elsewhere", 3600))))
		if err != nil || !bytes.Equal(first.Bytes(), second.Bytes()) {
			t.Errorf("%s: two archives of the same files differ (%v)", name, err)
		}
	}
}

func TestUsersCanUnpackAnArchive(t *testing.T) {
	at := time.Unix(1_790_000_000, 0).UTC()
	files := []file{{"caddy", 0o755, []byte("program")}, {"LICENSE", 0o644, []byte("terms")}}
	var packed bytes.Buffer
	if err := writeTar(&packed, "folder", files, at); err != nil {
		t.Fatal(err)
	}
	compressed, err := gzip.NewReader(&packed)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for archive := tar.NewReader(compressed); ; {
		header, err := archive.Next()
		if err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(archive)
		found = append(found, fmt.Sprint(header.Name, " ", header.Uid, header.Gid, header.Uname, " ", header.FileInfo().Mode(), " ", header.ModTime.Equal(at), " ", string(text), " ", err))
	}
	if want := []string{"folder/LICENSE 0 0 -rw-r--r-- true terms <nil>", "folder/caddy 0 0 -rwxr-xr-x true program <nil>"}; !slices.Equal(found, want) {
		t.Errorf("got %q, want %q", found, want)
	}

	packed.Reset()
	if err := writeZip(&packed, "folder", files, at); err != nil {
		t.Fatal(err)
	}
	archive, err := zip.NewReader(bytes.NewReader(packed.Bytes()), int64(packed.Len()))
	if err != nil || len(archive.File) != 2 || archive.File[1].Name != "folder/caddy" || !archive.File[1].Modified.Equal(at) {
		t.Errorf("the zip archive has %+v (%v)", archive, err)
	}
}
