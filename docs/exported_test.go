package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// saysItself are methods whose meaning their interface tells.
var saysItself = map[string]bool{"Error": true, "String": true, "Unwrap": true}

// TestExportedNamesAreDocumented: each exported function, method, type, constant and variable of a package has a
// comment of its own or that of its group. What programs export and what is generated does not count.
func TestExportedNamesAreDocumented(t *testing.T) {
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" || path != root && strings.HasPrefix(d.Name(), ".")):
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, path, nil, parser.ParseComments)
		if err != nil || f.Name.Name == "main" || ast.IsGenerated(f) {
			return err
		}
		for _, name := range undocumented(f) {
			t.Errorf("%s: %s has no comment", files.Position(name.Pos()), name.Name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// undocumented are the exported names of a file that no comment stands at.
func undocumented(f *ast.File) (out []*ast.Ident) {
	note := func(name *ast.Ident, comments ...*ast.CommentGroup) {
		for _, c := range comments {
			if c != nil {
				return
			}
		}
		if name.IsExported() {
			out = append(out, name)
		}
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil || ofExported(d.Recv.List[0].Type) && !saysItself[d.Name.Name] {
				note(d.Name, d.Doc)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					note(s.Name, d.Doc, s.Doc, s.Comment)
				case *ast.ValueSpec:
					for _, name := range s.Names {
						note(name, d.Doc, s.Doc, s.Comment)
					}
				}
			}
		}
	}
	return out
}

// ofExported reports whether a receiver's type is exported.
func ofExported(t ast.Expr) bool {
	switch t := t.(type) {
	case *ast.StarExpr:
		return ofExported(t.X)
	case *ast.IndexExpr:
		return ofExported(t.X)
	case *ast.Ident:
		return t.IsExported()
	}
	return false
}
